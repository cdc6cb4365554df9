// The nodes: who is there, what each does and why, and what it has given.

import { html } from "./vendor/preact-htm.js";
import { ago, percent, quantity, short, size } from "./format.js";
import { STATES, stateOf } from "./states.js";

export function State({ name }) {
  const { sign, tone, means } = stateOf(name);
  return html`<span class=${`state ${tone}`} title=${means}><span aria-hidden="true">${sign}</span> ${name}</span>`;
}

export function Nodes({ state, now }) {
  const total = state.nodes.reduce((sum, node) => sum + node.trained_tokens, 0);
  return html`<section aria-labelledby="nodes-title">
    <h2 id="nodes-title">Nodes</h2>
    <div class="scroll" tabindex="0" role="group" aria-label="Table of nodes">
      <table class="nodes">
        <thead><tr>
          ${["node", "state", "experts", "round", "speed", "busy", "trained", "sent", "received", "seen", "version"].map((head) => html`<th scope="col" key=${head}>${head}</th>`)}
        </tr></thead>
        <tbody>${state.nodes.map((node) => html`<${Node} key=${node.id} node=${node} state=${state} total=${total} now=${now} />`)}</tbody>
      </table>
    </div>
    <details class="legend"><summary>What the states mean</summary>
      <dl>${Object.entries(STATES).map(([name, { means }]) => html`<div key=${name}><dt><${State} name=${name} /></dt><dd>${means}</dd></div>`)}</dl>
    </details>
  </section>`;
}

function Node({ node, state, total, now }) {
  const mine = node.id === state.me;
  const share = total ? node.trained_tokens / total : 0;
  const trains = node.role === "trainer";
  return html`<tr class=${node.state === "lost" || node.state === "left" ? "away" : ""}>
    <th scope="row" title=${node.id}><span class="name">${node.name}</span> <small>${short(node.id)}${mine ? ", this node" : ""}</small></th>
    <td><${State} name=${node.state} /> <small class="reason">${node.reason}</small>${node.complaint && html`<small class="reason bad">says of ${node.complaint}</small>`}</td>
    <td data-label="experts">${trains ? node.experts.join(", ") || "none" : node.role}</td>
    <td data-label="round">${node.round}${node.in_sync ? html` <span class="state good" title="holds the last state to the bit">✓</span>` : ""}</td>
    <td data-label="speed">${node.tokens_per_second ? `${quantity(node.tokens_per_second)} tok/s` : "-"}</td>
    <td data-label="busy">${node.utilisation ? percent(node.utilisation) : "-"}</td>
    <td data-label="trained">${trains ? html`${quantity(node.trained_tokens)} <small>${percent(share)}</small>` : "-"}</td>
    <td data-label="sent">${size(node.sent)}</td>
    <td data-label="received">${size(node.received)}</td>
    <td data-label="seen">${ago(now - node.seen)}</td>
    <td data-label="version" class=${node.version === state.software ? "" : "bad"}>${node.version}</td>
  </tr>`;
}
