// Curves over rounds.

import { html, useEffect, useRef } from "./vendor/preact-htm.js";

const HEIGHT = 190;

function colours(element) {
  const style = getComputedStyle(element);
  return (name) => style.getPropertyValue(name).trim();
}

/** One chart.
 *  title: above it. series: [{name, colour, values, faint}], each as long as `rounds`. format: of a value.
 *  chosen: a round to mark, or null. choose: called with the round that was clicked. */
export function Chart({ title, rounds, series, format, chosen, choose, logarithmic = false }) {
  const place = useRef(null);
  const plot = useRef(null);
  const marked = useRef(null);
  marked.current = chosen;

  useEffect(() => {
    const colour = colours(place.current);
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const drawMark = (chart) => {
      if (marked.current == null) return;
      const x = chart.valToPos(marked.current, "x", true);
      chart.ctx.save();
      chart.ctx.strokeStyle = colour("--text");
      chart.ctx.setLineDash([4, 4]);
      chart.ctx.beginPath();
      chart.ctx.moveTo(x, chart.bbox.top);
      chart.ctx.lineTo(x, chart.bbox.top + chart.bbox.height);
      chart.ctx.stroke();
      chart.ctx.restore();
    };
    const make = () => {
      plot.current?.destroy();
      plot.current = new uPlot(
        {
          width: place.current.clientWidth,
          height: HEIGHT,
          scales: { x: { time: false }, y: logarithmic ? { distr: 3, log: 10 } : { range: (_, low, high) => [Math.min(0, low), high * 1.08 || 1] } },
          cursor: { sync: { key: "rounds" }, points: { size: 6 } },
          legend: { live: true },
          axes: [{ ...axis, size: 26 }, { ...axis, size: 54, values: (_, ticks) => ticks.map((tick) => (tick == null ? "" : format(tick))) }],
          series: [
            { label: "round" },
            ...series.map((line) => ({
              label: line.name,
              stroke: colour(line.colour),
              width: line.faint ? 1 : 2,
              spanGaps: true,
              points: { show: (chart) => chart.data[0].length < 3 },
              value: (_, value) => (value == null ? "-" : format(value)),
            })),
          ],
          hooks: { draw: [drawMark] },
        },
        [rounds, ...series.map((line) => line.values)],
        place.current,
      );
      plot.current.over.addEventListener("click", () => {
        const index = plot.current.cursor.idx;
        if (index != null) choose(plot.current.data[0][index]);
      });
    };
    make();
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    scheme.addEventListener("change", make);
    const resized = new ResizeObserver(() => plot.current.setSize({ width: place.current.clientWidth, height: HEIGHT }));
    resized.observe(place.current);
    return () => {
      scheme.removeEventListener("change", make);
      resized.disconnect();
      plot.current.destroy();
    };
  }, []);

  useEffect(() => {
    plot.current.setData([rounds, ...series.map((line) => line.values)]);
  }, [rounds.length, rounds[0], chosen]);

  const last = series.map((line) => [line.name, line.values.findLast((value) => value != null)]);
  const told = last.map(([name, value]) => `${name} ${value == null ? "not known" : format(value)}`).join(", ");
  return html`<figure class="chart" role="img" aria-label=${`${title}, now: ${told}`}>
    <figcaption>${title}</figcaption>
    <div ref=${place}></div>
  </figure>`;
}
