// Who trains which expert: a table of nodes and experts.

import { html } from "./vendor/preact-htm.js";
import { percent, short } from "./format.js";

const FRESH_ROUNDS = 1;

/** nodes: of the state. facts: of the round that is shown, its `owners`. rounds: round of each expert's oldest shard.
 *  live: whether leases count, or the owners of a past round. */
export function ExpertMap({ state, facts, live }) {
  const experts = [...Array(state.experts).keys()];
  const owners = live ? state.leases : ownersByExpert(facts);
  const known = new Map(state.nodes.map((node) => [node.id, node]));
  const rows = live
    ? state.nodes.filter((node) => node.role === "trainer" && (node.experts.length || node.state !== "left"))
    : Object.keys(facts?.owners ?? {}).map((id) => known.get(id) ?? { id, name: short(id), state: "left" });
  const load = state.expert_load;
  const orphans = experts.filter((expert) => !(owners[expert] ?? []).length);
  return html`<section aria-labelledby="experts-title">
    <h2 id="experts-title">Experts</h2>
    <p class=${orphans.length ? "told bad" : "told"}>
      ${orphans.length
        ? `Nobody trains expert ${orphans.join(", ")}. They keep their last version; another box, or more room on one, takes them up.`
        : `Every expert is trained by ${replicas(experts, owners)}.`}
    </p>
    <div class="scroll" tabindex="0" role="group" aria-label="Map of experts">
      <table class="map">
        <thead><tr><th scope="col">node</th>${experts.map((expert) => html`<th scope="col" key=${expert} class=${(owners[expert] ?? []).length ? "" : "orphan"}>${expert}</th>`)}</tr></thead>
        <tbody>
          ${rows.map((node) => html`<tr key=${node.id}>
            <th scope="row" title=${node.id}>${node.name}</th>
            ${experts.map((expert) => html`<${Cell} key=${expert} node=${node} expert=${expert} held=${(owners[expert] ?? []).includes(node.id)} lost=${node.state === "lost" && (node.experts ?? []).includes(expert)} behind=${live ? behind(state, expert) : 0} state=${state} />`)}
          </tr>`)}
        </tbody>
        <tfoot>
          <tr><th scope="row">owners</th>${experts.map((expert) => html`<td key=${expert} class=${(owners[expert] ?? []).length ? "" : "orphan"}>${(owners[expert] ?? []).length}</td>`)}</tr>
          ${live && html`<tr><th scope="row">rounds behind</th>${experts.map((expert) => html`<td key=${expert} class=${behind(state, expert) > FRESH_ROUNDS ? "orphan" : ""}>${behind(state, expert)}</td>`)}</tr>`}
          ${live && load.length > 0 && html`<tr><th scope="row">share of tokens</th>${experts.map((expert) => html`<td key=${expert}>${percent(mean(load.map((layer) => layer[expert])))}</td>`)}</tr>`}
        </tfoot>
      </table>
    </div>
    ${live && load.length > 0 && html`<${Load} state=${state} experts=${experts} />`}
  </section>`;
}

/** What the routers of each layer choose, darker for more. */
function Load({ state, experts }) {
  const dead = new Set(state.dead_experts.map(([layer, expert]) => `${layer} ${expert}`));
  return html`<details class="load" open=${dead.size > 0}>
    <summary class=${dead.size ? "bad" : ""}>${dead.size ? `${dead.size} of ${state.run.layers * state.experts} experts get almost no tokens` : "Every expert gets tokens in every layer"}</summary>
    <div class="scroll" tabindex="0" role="group" aria-label="Load of the experts by layer">
      <table class="map">
        <thead><tr><th scope="col">layer</th>${experts.map((expert) => html`<th scope="col" key=${expert}>${expert}</th>`)}</tr></thead>
        <tbody>${state.expert_load.map((row, layer) => html`<tr key=${layer}>
          <th scope="row">${layer}</th>
          ${row.map((share, expert) => html`<td key=${expert} class=${dead.has(`${layer} ${expert}`) ? "orphan" : ""} title=${`layer ${layer}, expert ${expert}: ${(100 * share).toFixed(1)}% of the choices`}>
            <span class="heat" style=${{ opacity: Math.min(1, (share * row.length) / 3) }}></span><span class="share">${Math.round(100 * share)}</span></td>`)}
        </tr>`)}</tbody>
      </table>
    </div>
    <p class="told">Per cent of the choices of a layer's router on held-out text, before the last round; even is ${(100 / state.experts).toFixed(1)}.</p>
  </details>`;
}

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

function Cell({ node, expert, held, lost, behind, state }) {
  if (!held && !lost) return html`<td></td>`;
  const told = lost
    ? `${node.name} held expert ${expert} until it was lost`
    : `${node.name} trains expert ${expert}` + (behind ? `, whose last version is ${behind} rounds old` : state.round != null ? `, last changed in round ${state.expert_rounds[expert]}` : "");
  return html`<td class=${lost ? "held lost" : behind > FRESH_ROUNDS ? "held old" : "held"} title=${told}><span aria-label=${told}>${lost ? "✕" : "●"}</span></td>`;
}

function behind(state, expert) {
  return state.round == null ? 0 : state.round - (state.expert_rounds[expert] ?? 0);
}

function ownersByExpert(facts) {
  const found = {};
  for (const [node, experts] of Object.entries(facts?.owners ?? {})) for (const expert of experts) (found[expert] ??= []).push(node);
  return found;
}

function replicas(experts, owners) {
  const counts = experts.map((expert) => owners[expert].length);
  const low = Math.min(...counts);
  const high = Math.max(...counts);
  return low === high ? `${low} node${low === 1 ? "" : "s"}` : `${low} to ${high} nodes`;
}
