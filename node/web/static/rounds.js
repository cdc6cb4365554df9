// Where the swarm is in time: this node's phases, and a slider over past rounds.

import { html, useEffect, useState } from "./vendor/preact-htm.js";
import { clock, duration, loss, quantity, short } from "./format.js";
import { roundFacts } from "./live.js";
import { stateOf } from "./states.js";
import { State } from "./nodes.js";

const SHOWN_ROUNDS = 3;
const LEAST_SECONDS = 20;

/** The phases of this node over the last rounds, and what it waits for now. */
export function Timeline({ state, rounds, now }) {
  const { phases } = state;
  if (!phases.length) return null;
  const usual = rounds.slice(-SHOWN_ROUNDS).reduce((sum, line) => sum + line.seconds, 0);
  const span = Math.min(now - phases[0].since, Math.max(LEAST_SECONDS, usual)) || 1;
  const start = now - span;
  const shown = phases
    .map((phase, index) => ({ ...phase, end: phases[index + 1]?.since ?? now }))
    .filter((phase) => phase.end > start);
  const current = phases[phases.length - 1];
  return html`<section aria-labelledby="time-title">
    <h2 id="time-title">This node</h2>
    <p class="told"><${State} name=${current.state} /> ${current.reason}, for ${duration(Math.max(0, now - current.since))}</p>
    <ol class="timeline" aria-label=${`Phases of the last ${duration(span)}`}>
      ${shown.map((phase) => html`<li key=${phase.since} class=${`${stateOf(phase.state).tone} ${phase.state}`}
        style=${{ width: `${(100 * (phase.end - Math.max(phase.since, start))) / span}%` }}
        title=${`${phase.state} for ${duration(phase.end - phase.since)} from ${clock(phase.since)}: ${phase.reason}`}><span>${phase.state}</span></li>`)}
    </ol>
    <p class="scale"><span>${duration(span)} ago</span><span>now</span></p>
  </section>`;
}

/** A slider over the rounds that are known; `chosen` is one of them, or null for the present. */
export function Scrubber({ state, rounds, chosen, choose }) {
  if (rounds.length < 2) return null;
  const last = rounds[rounds.length - 1].round;
  const number = chosen ?? last;
  return html`<section class="scrubber" aria-label="Past rounds">
    <label for="scrub">round ${number}${state.run.rounds ? ` of ${state.run.rounds}` : ""}</label>
    <input id="scrub" type="range" min=${rounds[0].round} max=${last} value=${number}
      onInput=${(event) => choose(Number(event.target.value) === last ? null : Number(event.target.value))} />
    <button type="button" disabled=${chosen == null} onClick=${() => choose(null)}>live</button>
  </section>`;
}

export function useRoundFacts(number) {
  const [facts, setFacts] = useState(null);
  useEffect(() => {
    let wanted = true;
    setFacts(null);
    if (number != null) roundFacts(number).then((found) => wanted && setFacts(found));
    return () => {
      wanted = false;
    };
  }, [number]);
  return facts;
}

/** What happened in one round. */
export function Round({ line, facts, nodes }) {
  if (!line) return null;
  const names = new Map(nodes.map((node) => [node.id, node.name]));
  const named = (id) => names.get(id) ?? short(id);
  const total = facts ? Object.values(facts.tokens).reduce((sum, tokens) => sum + tokens, 0) : 0;
  return html`<dl class="facts">
    <div><dt>loss</dt><dd>${loss(line.loss)}</dd></div>
    <div><dt>held-out before it</dt><dd>${loss(line.heldout_loss)}</dd></div>
    <div><dt>took</dt><dd>${line.seconds ? duration(line.seconds) : "-"}${facts && facts.train_seconds ? `, ${duration(facts.train_seconds)} of it training` : ""}</dd></div>
    ${line.alpha > 0 && html`<div><dt>merged</dt><dd>alpha ${line.alpha.toPrecision(3)}</dd></div>`}
    ${facts && html`<div><dt>counted</dt><dd>${Object.entries(facts.tokens).map(([id, tokens]) => `${named(id)} ${Math.round((100 * tokens) / total)}%`).join(", ") || "nobody"} of ${quantity(total)} tokens</dd></div>`}
    ${facts && facts.missing.length > 0 && html`<div><dt>did not arrive</dt><dd class="bad">${facts.missing.map(named).join(", ")}</dd></div>`}
    ${facts && facts.carried.length > 0 && html`<div><dt>unchanged</dt><dd>${facts.carried.length} shards, such as ${facts.carried[0]}</dd></div>`}
    ${facts && html`<div><dt>led by</dt><dd>${named(facts.leader)}</dd></div>`}
  </dl>`;
}
