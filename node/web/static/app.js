// The page: one state, from which everything is drawn.

import { html, render, useState } from "./vendor/preact-htm.js";
import { Chart } from "./charts.js";
import { ExpertMap } from "./experts.js";
import { ago, clock, duration, loss, percent, quantity, size } from "./format.js";
import { Swarm } from "./live.js";
import { Nodes } from "./nodes.js";
import { Round, Scrubber, Timeline, useRoundFacts } from "./rounds.js";

const GONE = ["lost", "left"];

function Page({ swarm }) {
  const { state, rounds, events } = swarm;
  const [chosen, choose] = useState(null);
  const shown = chosen ?? (rounds.length ? rounds[rounds.length - 1].round : null);
  const past = useRoundFacts(chosen);
  const facts = chosen == null ? state.last_round : past;
  const now = state.time + swarm.age;
  const line = rounds.find((each) => each.round === shown);
  return html`
    <${Header} swarm=${swarm} />
    <main>
      ${swarm.isStale && html`<p class="banner" role="alert">No news for ${duration(swarm.age)}: the node that serves this page does not answer. What you see is old; trying again.</p>`}
      <${Health} troubles=${state.health} />
      <${Figures} state=${state} rounds=${rounds} now=${now} />
      <div class="charts"><${Curves} rounds=${rounds} chosen=${chosen} choose=${(round) => choose(round === rounds[rounds.length - 1].round ? null : round)} /></div>
      <${Scrubber} state=${state} rounds=${rounds} chosen=${chosen} choose=${choose} />
      <${Round} line=${line} facts=${facts} nodes=${state.nodes} />
      <${Timeline} state=${state} rounds=${rounds} now=${now} />
      <${ExpertMap} state=${state} facts=${facts} live=${chosen == null} />
      <${Nodes} state=${state} now=${now} />
      <${Events} events=${events} />
    </main>`;
}

function Header({ swarm }) {
  const { state } = swarm;
  return html`<header>
    <h1>${state.run.name} <small title=${state.run.id}>${state.run.id.slice(0, 12)}</small></h1>
    <p class="phase">${phase(state)}</p>
    <p class="updated"><span class=${swarm.isStale ? "dot bad" : "dot good"} aria-hidden="true"></span>updated ${ago(swarm.age)}</p>
  </header>`;
}

function phase({ warmup, round, run }) {
  if (round == null) return "waiting for its first round";
  if (run.rounds && round >= run.rounds) return "complete";
  if (warmup?.phase === "warmup") return `merging warm-up: alpha ${warmup.alpha.toPrecision(3)} before round ${warmup.next_round}`;
  return warmup ? "training, the merging warm-up is over" : "training";
}

function Health({ troubles }) {
  if (!troubles.length) return html`<p class="health" role="status"><span class="state good"><span aria-hidden="true">✓</span> healthy</span></p>`;
  return html`<ul class="health" role="status">
    ${troubles.map((trouble) => html`<li key=${trouble.code + trouble.text}>
      <span class=${`state ${trouble.severity === "error" ? "bad" : "wait"}`}><span aria-hidden="true">${trouble.severity === "error" ? "✕" : "!"}</span> ${trouble.code}</span>
      ${trouble.text}. <small>To do: ${trouble.action}.</small></li>`)}
  </ul>`;
}

function Figures({ state, rounds, now }) {
  const last = rounds[rounds.length - 1];
  const here = state.nodes.filter((node) => !GONE.includes(node.state));
  const trainers = here.filter((node) => node.role === "trainer");
  const moved = movedIn(last, rounds[rounds.length - 2]);
  return html`<dl class="figures">
    <${Figure} name="round" value=${state.round ?? "-"} more=${state.run.rounds ? `of ${state.run.rounds}` : "without end"} part=${state.run.rounds ? (state.round ?? 0) / state.run.rounds : null} />
    <${Figure} name="held-out loss" value=${loss(state.heldout_loss)} more=${`training ${loss(state.loss)}`} />
    <${Figure} name="tokens" value=${quantity(state.tokens ?? 0)} more=${last?.tokens_per_second ? `${quantity(last.tokens_per_second)}/s` : ""} />
    <${Figure} name="nodes" value=${trainers.length} more=${`train; ${here.length - trainers.length} keep and serve`} />
    <${Figure} name="experts" value=${`${state.experts_covered}/${state.experts}`} more="have an owner" bad=${state.experts_covered < state.experts} />
    <${Figure} name="busy" value=${state.utilisation ? percent(state.utilisation) : "-"} more="of the time in training steps" />
    <${Figure} name="moved" value=${moved == null ? "-" : size(moved)} more="in the last round" />
    <${Figure} name="left" value=${state.eta_seconds == null ? "-" : duration(Math.max(0, state.eta_seconds - (now - state.time)))} more=${last ? `a round takes ${duration(last.seconds)}` : ""} />
  </dl>`;
}

function Figure({ name, value, more, part = null, bad = false }) {
  return html`<div class="figure">
    <dt>${name}</dt>
    <dd class=${bad ? "bad" : ""}>${value}</dd>
    ${part != null && html`<progress max="1" value=${part} aria-label=${`${name}: ${percent(part)}`}></progress>`}
    <dd class="more">${more}</dd>
  </div>`;
}

function Curves({ rounds, chosen, choose }) {
  const trained = rounds.filter((line) => line.round > 0);
  if (!trained.length) return html`<p class="told">The first round is not over yet; curves come with it.</p>`;
  const numbers = trained.map((line) => line.round);
  const moved = trained.map((line, index) => movedIn(line, trained[index - 1]));
  return html`
    <${Chart} title="Loss, nats per token" rounds=${numbers} chosen=${chosen} choose=${choose} logarithmic=${true} format=${loss}
      series=${[
        { name: "training", colour: "--faint", values: trained.map((line) => line.loss), faint: true },
        { name: "held-out", colour: "--good", values: trained.map((line) => line.heldout_loss) },
      ]} />
    <${Chart} title="Tokens per second" rounds=${numbers} chosen=${chosen} choose=${choose} format=${quantity}
      series=${[{ name: "swarm", colour: "--accent", values: trained.map((line) => line.tokens_per_second || null) }]} />
    <${Chart} title="Busy: time in training steps" rounds=${numbers} chosen=${chosen} choose=${choose} format=${percent}
      series=${[{ name: "busy", colour: "--wait", values: trained.map((line) => line.utilisation || null) }]} />
    <${Chart} title="Moved in a round, all nodes" rounds=${numbers} chosen=${chosen} choose=${choose} format=${size}
      series=${[{ name: "bytes", colour: "--calm", values: moved }]} />`;
}

/** Bytes of a round; null where they were not counted, or from nothing again because the node was started anew. */
function movedIn(line, before) {
  const known = before?.bytes_moved > 0 && line.bytes_moved >= before.bytes_moved;
  return known ? line.bytes_moved - before.bytes_moved : null;
}

function Events({ events }) {
  return html`<section aria-labelledby="events-title">
    <h2 id="events-title">What happened</h2>
    ${events.length
      ? html`<ol class="events">${[...events].reverse().map((event, index) => html`<li key=${events.length - index} class=${event.kind}><time>${clock(event.time)}</time> ${event.text}</li>`)}</ol>`
      : html`<p class="told">Nothing worth a line since this node looks.</p>`}
  </section>`;
}

const place = document.getElementById("app");
const swarm = new Swarm(() => {
  if (!swarm.state) return;
  if (place.querySelector(".opening")) place.replaceChildren();
  document.title = `${swarm.state.run.name}: round ${swarm.state.round ?? "-"}`;
  render(html`<${Page} swarm=${swarm} />`, place);
});
swarm.start();
