// The states of a node: a sign and a word for each, as a colour alone says nothing to many.

export const STATES = {
  training: { sign: "▲", tone: "good", means: "takes local steps on its experts and the shared parameters" },
  averaging: { sign: "⇄", tone: "good", means: "hands in its work and fetches the results of the others" },
  merging: { sign: "⧉", tone: "good", means: "merges experts that resemble each other" },
  following: { sign: "◇", tone: "calm", means: "keeps the state of the run and passes it on, without training" },
  paused: { sign: "‖", tone: "calm", means: "was told to train nothing; it keeps and serves the state" },
  finished: { sign: "✓", tone: "calm", means: "the run is complete" },
  waiting: { sign: "◔", tone: "wait", means: "waits for others, who are named" },
  syncing: { sign: "↓", tone: "wait", means: "fetches the state of the run" },
  starting: { sign: "…", tone: "wait", means: "has just come" },
  left: { sign: "○", tone: "gone", means: "has said goodbye" },
  lost: { sign: "✕", tone: "bad", means: "was not heard of when its lease ended" },
};

export function stateOf(name) {
  return STATES[name] ?? { sign: "?", tone: "wait", means: "a state of another release" };
}
