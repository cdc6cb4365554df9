// The state of the swarm as this node tells it: everything once, then what changes, by server-sent events.

const STALE_SECONDS = 15;
const MOST_ROUNDS = 5000;

export class Swarm {
  constructor(changed) {
    this.state = null;
    this.rounds = [];
    this.events = [];
    this.heard = 0; // when the last sign of life came, in milliseconds
    this.connected = false;
    this.changed = changed;
  }

  async start() {
    await this.reload();
    const source = new EventSource("/api/v1/events");
    source.addEventListener("open", () => this.reload());
    source.addEventListener("state", (event) => this.take(JSON.parse(event.data)));
    source.addEventListener("round", (event) => this.add(JSON.parse(event.data)));
    source.addEventListener("error", () => {
      this.connected = false;
      this.changed();
    });
    setInterval(this.changed, 1000); // ages grow
  }

  async reload() {
    try {
      const response = await fetch("/api/v1/state");
      if (!response.ok) throw new Error(await response.text());
      const { rounds, ...state } = await response.json();
      this.rounds = rounds;
      this.take(state);
    } catch {
      this.connected = false; // the stream tries again, and with it this
      this.changed();
    }
  }

  take(state) {
    const { events, ...rest } = state;
    const newest = this.events.length ? this.events[this.events.length - 1].time : 0;
    this.events = this.events.concat(events.filter((event) => event.time > newest)).slice(-200);
    this.state = rest;
    this.heard = Date.now();
    this.connected = true;
    this.changed();
  }

  add(line) {
    if (!this.rounds.length || line.round > this.rounds[this.rounds.length - 1].round) {
      this.rounds = [...this.rounds, line].slice(-MOST_ROUNDS);
      this.changed();
    }
  }

  get age() {
    return (Date.now() - this.heard) / 1000;
  }

  get isStale() {
    return !this.connected || this.age > STALE_SECONDS;
  }
}

const past = new Map();

export async function roundFacts(number) {
  if (!past.has(number)) {
    const response = await fetch(`/api/v1/rounds/${number}`);
    if (!response.ok) return null;
    past.set(number, await response.json());
  }
  return past.get(number);
}
