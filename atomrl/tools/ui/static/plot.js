// One chart: curves over steps, time or tokens, drawn with uPlot.
import { html, useState, useEffect, useMemo, useRef, number } from "./lib.js";
import { smoothed } from "./curves.js";
import { t } from "./i18n.js";

const DASHES = [[], [6, 3], [2, 3], [9, 3, 2, 3], [12, 4], [4, 2]];
const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 2e6, 5e6];

/** Color and dash pattern of a curve by its index, so that curves differ in both. */
const lookOf = (place) => ({ name: `--c${place % 8}`, dash: DASHES[place % DASHES.length] });

/** The same as a CSS background, for legends and tables. */
export function sample(place) {
  const { name, dash } = lookOf(place);
  let end = 0;
  const parts = dash.map((length, i) => `${i % 2 ? "transparent" : `var(${name})`} ${end}px ${(end += length)}px`);
  return parts.length ? `repeating-linear-gradient(to right, ${parts.join(", ")})` : `var(${name})`;
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

/** Axis labels, with as many digits as needed to distinguish the values. */
function ticks(_, values) {
  const there = values.filter((value) => value !== null);
  const gap = there.length > 1 ? Math.abs(there[1] - there[0]) : 0;
  const digits = gap ? Math.ceil(Math.log10(Math.max(...there.map(Math.abs)) / gap)) + 1 : 3;
  return values.map((value) => (value === null ? "" : Math.abs(value) >= 1e4 ? compact.format(value) : number(value, Math.max(3, Math.min(digits, 15))).replace(/\.?0+e/, "e")));
}

/** Units of a time axis: seconds per unit, the largest range it is used for, and its text. */
const UNITS = [[1, 180, "s"], [60, 10800, "min"], [3600, 360000, "h"], [86400, Infinity, "d"]];
const unitOf = (span) => UNITS.find(([, most]) => span < most);

/** Describe a position on the x axis. */
export function said(axis, x, span) {
  if (axis === "tokens") return t("n_tokens", { n: compact.format(x) });
  if (axis === "time") {
    const [size, , word] = unitOf(span);
    return t(String(word), { n: number(x / Number(size)) });
  }
  return t("step_n", { n: x.toLocaleString("en") });
}

const HORIZONTAL = {
  step: () => ({ incrs: STEPS, values: (_, xs) => xs.map((x) => (x >= 1e4 ? compact.format(x) : String(x))) }),
  tokens: () => ({ values: (_, xs) => xs.map((x) => compact.format(x)) }),
  time: (span) => {
    const [size] = unitOf(span);
    const incrs = [0.1, 0.2, 0.5, ...STEPS].map((one) => one * Number(size));
    return { incrs, values: (_, xs) => xs.map((x) => (x === 0 ? "0" : said("time", x, span))) };
  },
};

/** Range of the y axis, with a margin even if the curve is constant. */
function around(_, low, high) {
  if (low === null || high === null) return [0, 1];
  if (low === high) return [low - (Math.abs(low) / 10 || 0.5), high + (Math.abs(high) / 10 || 0.5)];
  return uPlot.rangeNum(low, high, 0.08, true);
}

/** Ticks of a log axis: powers of ten, and with few of them also 2 and 5 times these. */
function logLines(plot, values) {
  const { min, max } = plot.scales.y;
  const kept = Math.log10(max / min) > 2 ? [1] : [1, 2, 5];
  return values.map((value) => (kept.includes(Math.round(value / 10 ** Math.floor(Math.log10(value) + 1e-9))) ? value : null));
}

function aroundLog(_, low, high) {
  if (low === null || high === null) return [0.1, 1];
  return low === high ? [low / 2, high * 2] : uPlot.rangeLog(low, high, 10, false);
}

const there = (value) => value !== null && value !== undefined;

/** Values of a sparse metric (missing in most steps) are connected; elsewhere a missing value is a gap. */
const sparse = (values) => 2 * values.filter(there).length < values.length;

/** Isolated values between two missing ones, which are drawn as points to be visible. */
function alone(plot, place) {
  const values = plot.data[place];
  const given = [];
  values.forEach((value, i) => value !== undefined && given.push(i));
  return given.filter((i, k) => there(values[i]) && !there(values[given[k - 1]]) && !there(values[given[k + 1]]));
}

/** The uPlot series of a curve: the curve, faint raw values if it is smoothed, and the edges of its band. */
function drawnOf(one, look, smoothing) {
  const stroke = color(look.name);
  const edge = { stroke: `${stroke}50`, width: 1, points: { show: false } }; // visible even if the band is as narrow as a spike
  const dots = one.dots || (sparse(one.y) && one.y.filter(there).length < 100);
  const itself = {
    stroke,
    width: one.dots ? 1.4 : 1.7,
    dash: look.dash,
    spanGaps: one.dots || sparse(one.y),
    points: dots ? { show: true, size: 7, width: 1.6, fill: color("--card") } : { show: false, filter: alone, size: 4, fill: stroke },
  };
  const raw = { stroke: stroke + (one.low ? "38" : "60"), width: 1, spanGaps: itself.spanGaps, points: { show: false } };
  return [itself, ...(smoothing && !one.dots ? [raw] : []), ...(one.low ? [edge, edge] : [])];
}

/** The same series as data columns. */
function columnsOf(one, smoothing, log) {
  const able = (values) => (log ? values.map((value) => (value > 0 ? value : value === undefined ? undefined : null)) : values);
  const smooth = smoothing && !one.dots;
  const itself = smooth ? smoothed(one.y, smoothing) : one.y;
  return [itself, ...(smooth ? [one.y] : []), ...(one.low ? [one.high, one.low] : [])].map(able);
}

const columnCount = (one, smooth) => 1 + (smooth && !one.dots ? 1 : 0) + (one.low ? 2 : 0);

/** Index of each curve's first column in uPlot's data. */
function placesOf(series, smooth) {
  let place = 1;
  return series.map((one) => {
    place += columnCount(one, smooth);
    return place - columnCount(one, smooth);
  });
}

/** Draw the flags of findings. */
function flagged(flags) {
  return (plot) => {
    const { ctx, bbox } = plot;
    const unit = devicePixelRatio;
    ctx.save();
    for (const { x: at, severity } of flags) {
      const x = plot.valToPos(at, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = ctx.fillStyle = color(severity === "error" ? "--bad" : "--warn");
      ctx.setLineDash([3, 3]);
      ctx.lineWidth = unit;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.setLineDash([]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x + 8 * unit, bbox.top + 4 * unit);
      ctx.lineTo(x, bbox.top + 8 * unit);
      ctx.fill();
    }
    ctx.restore();
  };
}

/** Draw the chart as an image, with title and legend. */
function picture(plot, title, about, series) {
  const unit = devicePixelRatio;
  const source = plot.ctx.canvas;
  const canvas = document.createElement("canvas");
  const edge = 12 * unit;
  const line = 18 * unit;
  canvas.width = source.width + 2 * edge;
  canvas.height = source.height + 2 * edge + line * (2 + series.length);
  const ctx = canvas.getContext("2d");
  ctx.fillStyle = color("--card");
  ctx.fillRect(0, 0, canvas.width, canvas.height);
  ctx.textBaseline = "middle";
  const write = (text, x, y, weight, name) => {
    ctx.font = `${weight} ${12 * unit}px system-ui, sans-serif`;
    ctx.fillStyle = color(name);
    ctx.fillText(text, x, y, canvas.width - x - edge);
  };
  write(title, edge, edge + line / 2, 600, "--text");
  write(about, edge, edge + 1.5 * line, 400, "--faint");
  ctx.drawImage(source, edge, edge + 2 * line);
  series.forEach((one, i) => {
    const y = edge + 2 * line + source.height + (i + 0.5) * line;
    const { name, dash } = lookOf(one.color ?? i);
    ctx.strokeStyle = color(name);
    ctx.lineWidth = 2 * unit;
    ctx.setLineDash(dash.map((length) => length * unit));
    ctx.beginPath();
    ctx.moveTo(edge, y);
    ctx.lineTo(edge + 26 * unit, y);
    ctx.stroke();
    write(one.label, edge + 34 * unit, y, 400, "--text");
  });
  return canvas.toDataURL("image/png");
}

function save(address, name) {
  const node = document.createElement("a");
  node.href = address;
  node.download = name;
  node.click();
}

/** True while a node is in or near the viewport. */
function useNear(node) {
  const [near, setNear] = useState(false);
  useEffect(() => {
    const watch = new IntersectionObserver((seen) => setNear(seen[seen.length - 1].isIntersecting), { rootMargin: "100% 0px" });
    watch.observe(node.current);
    return () => watch.disconnect();
  }, []);
  return near;
}

/** A number that changes with the theme. */
function useTheme() {
  const [count, setCount] = useState(0);
  useEffect(() => {
    const again = () => setCount((n) => n + 1);
    const media = matchMedia("(prefers-color-scheme: dark)");
    addEventListener("theme", again);
    media.addEventListener("change", again);
    return () => {
      removeEventListener("theme", again);
      media.removeEventListener("change", again);
    };
  }, []);
  return count;
}

/**
 * @typedef {{name: string, label: string, about?: string, x: number[], y: (number | null)[], low?: (number | null)[], high?: (number | null)[],
 *   first?: number[], last?: number[], dots?: boolean, color?: number}} Series
 * `x`: positions on the axis; `first` and `last`: the steps of each point; `low` and `high`: its band; `dots`: an
 * evaluation, drawn as points without smoothing.
 */

/** Index of the nearest of increasing values. */
function nearest(xs, x) {
  let low = 0;
  let high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle;
  }
  return x - xs[low] <= xs[high] - x ? low : high;
}

/** The steps of a curve at a position, or null. */
function stepsAt(series, x) {
  for (const one of series) {
    const i = one.last ? one.x.indexOf(x) : -1;
    if (i >= 0) return [one.first[i], one.last[i]];
  }
  return null;
}

function summary(title, series, range) {
  const [least, most] = range;
  const parts = series.flatMap(({ label, y, low, high, x, last: steps }) => {
    const seen = y.flatMap((value, i) => (there(value) && x[i] >= least && x[i] <= most ? [i] : []));
    if (!seen.length) return [];
    const [from, to, at] = [seen[0], seen[seen.length - 1], steps || x];
    return [t("curve_said", { label, first: number(y[from]), last: number(y[to]), from: at[from], to: at[to] }) + (low && high ? ` [${number(low[to])}, ${number(high[to])}]` : "")];
  });
  return `${title}: ${parts.join("; ")}`;
}

/**
 * @typedef {{x: number[], first: number[], last: number[]}} Steps
 * `steps` and `axis`: the training steps and their positions. All charts of a page show the same step under the cursor.
 *
 * @param {{title: string, sub?: string, about: string, series: Series[], steps: Steps, axis?: string, range: number[], smoothing?: number, log?: boolean, onLog?: () => void,
 *   flags?: {x: number, severity: string}[], onStep?: (first: number, last: number) => void, onZoom: (from: number, to: number) => void,
 *   onWhole: () => void, onLarge?: () => void, sync: string, csv: string, height?: number}} props
 */
export function Chart({ title, sub = "", about, series, steps: all, axis = "step", range, smoothing = 0, log = false, onLog, flags = [], onStep, onZoom, onWhole, onLarge, sync, csv, height = 180 }) {
  const box = useRef(null);
  const plot = useRef(null);
  const legend = useRef(null);
  const at = useRef(null);
  const spoken = useRef(null);
  const [hidden, setHidden] = useState([]);
  const near = useNear(box);
  const theme = useTheme();
  const shown = useMemo(() => series.map((one, i) => ({ ...one, color: one.color ?? i })).filter((one) => !hidden.includes(one.name)), [series, hidden]);
  const able = log && shown.some((one) => one.y.some((value) => value > 0));
  const calls = useRef(null);
  calls.current = { onStep, onZoom, onWhole };
  const drawn = useRef(null); // what is drawn, which may lag behind the props
  const shape = JSON.stringify([shown.map((one) => [one.name, one.dots, one.color, Boolean(one.low), sparse(one.y)]), flags, theme, near, axis, range, able, height, smoothing > 0]);
  const data = useMemo(() => {
    if (!near || !shown.length) return [[]];
    const tables = shown.map((one) => [one.x, ...columnsOf(one, smoothing, able)]);
    const together = tables.every(([x]) => x === tables[0][0]);
    return together ? [tables[0][0], ...tables.flatMap(([, ...columns]) => columns)] : uPlot.join(tables);
  }, [shown, smoothing, able, near]);

  /** Show the step under the cursor and its values; without a cursor, the newest. */
  const tell = (self) => {
    if (!legend.current || !at.current || !drawn.current) return "";
    const { shown: now, steps: every, smooth, axis: across, range: [from, to] } = drawn.current;
    const begins = placesOf(now, smooth);
    const index = self.cursor.idx;
    const pointed = there(index) && there(self.data[0][index]) && self.cursor.left >= 0;
    const k = pointed && every.x.length ? nearest(every.x, self.posToVal(self.cursor.left, "x")) : -1;
    const x = k >= 0 ? every.x[k] : pointed ? self.data[0][index] : null;
    const steps = k >= 0 ? [every.first[k], every.last[k]] : pointed ? stepsAt(now, x) : null;
    const words = [];
    if (pointed && across !== "step") words.push(said(across, x, to - from));
    if (steps && steps[0] < steps[1]) words.push(t("steps_n", { from: steps[0].toLocaleString("en"), to: steps[1].toLocaleString("en") }));
    else if (pointed && (steps || across === "step")) words.push(said("step", steps ? steps[1] : x, 0));
    at.current.textContent = words.join(" · ");
    at.current.hidden = !pointed;
    if (pointed) { // below the cursor, inside the plot
      const half = at.current.offsetWidth / 2;
      const middle = self.over.offsetLeft + self.valToPos(x, "x");
      at.current.style.left = `${Math.max(half, Math.min(self.width - half, middle))}px`;
    }
    const values = now.map((one, k) => {
      const column = self.data[begins[k]] || [];
      let i = pointed ? index : self.data[0].findLastIndex((own, j) => own <= to && there(column[j]));
      // Between two of its values, a curve has the earlier one.
      while (i >= 0 && (column[i] === undefined || (column[i] === null && one.dots))) i--;
      if (i < 0 || !there(column[i])) return "–";
      const own = self.data[0][i];
      const [low, high] = one.low ? [1, 2].map((back) => self.data[begins[k] + columnCount(one, smooth) - back][i]) : [0, 0];
      const beside = smooth && !one.dots ? ` (${t("raw", { n: number(self.data[begins[k] + 1][i]) })})` : one.low ? ` [${number(low)}, ${number(high)}]` : "";
      const text = number(column[i]) + beside;
      return pointed && one.dots && (own !== x || steps[0] < steps[1]) ? `${text} (${stepsAt([one], own) ? t("step_n", { n: stepsAt([one], own)[1].toLocaleString("en") }) : said(across, own, to - from)})` : text;
    });
    legend.current.querySelectorAll(".value").forEach((node, k) => (node.textContent = values[now.findIndex((one) => one.name === node.dataset.name)] ?? ""));
    return [...words, ...now.map((one, i) => `${one.label} ${values[i]}`)].join(", ");
  };
  useEffect(() => {
    const node = box.current;
    if (!near || !node || !shown.length) return undefined;
    const smooth = smoothing > 0;
    const looks = shown.map((one) => lookOf(one.color));
    const bands = [];
    let place = 1;
    shown.forEach((one, i) => {
      place += columnCount(one, smooth);
      if (one.low) bands.push({ series: [place - 2, place - 1], fill: color(looks[i].name) + "2e" });
    });
    const begins = placesOf(shown, smooth);
    const main = new Set(begins);
    const pointed = (_, which) => color(looks[Math.max(0, begins.findLastIndex((begin) => begin <= which))].name);
    const line = { stroke: color("--faint"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    drawn.current = { shown, steps: all, smooth, axis, range };
    const made = new uPlot(
      {
        width: Math.max(120, node.clientWidth),
        height,
        padding: [8, 20, 0, 0],
        legend: { show: false },
        cursor: { y: false, sync: { key: sync }, drag: { x: true, y: false }, points: { size: 7, fill: pointed, stroke: pointed }, dataIdx: (self, which, index) => (main.has(which) ? index : null) },
        scales: { x: { time: false, range: () => range }, y: able ? { distr: 3, range: aroundLog } : { range: around } },
        axes: [{ ...line, grid: { show: false }, size: 24, gap: 4, space: 60, ...HORIZONTAL[axis](range[1] - range[0]) }, { ...line, size: 48, gap: 4, space: Math.max(30, height / 10), ...(able ? { grid: { ...line.grid, filter: logLines } } : { values: ticks }) }],
        series: [{}, ...shown.flatMap((one, i) => drawnOf(one, looks[i], smoothing))],
        bands,
        hooks: {
          draw: [flagged(flags)],
          setCursor: [tell],
          setSelect: [
            (self) => {
              const { left, width } = self.select;
              if (width > 4) calls.current.onZoom(self.posToVal(left, "x"), self.posToVal(left + width, "x"));
            },
          ],
        },
      },
      data,
      node,
    );
    plot.current = made;
    let moved = false;
    made.over.addEventListener("mousedown", () => (moved = false));
    made.over.addEventListener("mousemove", (event) => (moved = moved || event.buttons > 0));
    made.over.addEventListener("click", (event) => {
      if (event.pointerType === "touch") return; // touch has no other way to select a step
      const index = made.cursor.idx;
      const steps = !moved && there(index) && stepsAt(drawn.current.shown, made.data[0][index]);
      if (steps && calls.current.onStep) calls.current.onStep(steps[0], steps[1]);
    });
    made.over.addEventListener("dblclick", () => calls.current.onWhole());
    const watch = new ResizeObserver(() => node.clientWidth && Math.abs(node.clientWidth - made.width) > 1 && made.setSize({ width: node.clientWidth, height }));
    watch.observe(node);
    return () => {
      watch.disconnect();
      plot.current = null;
      made.destroy();
    };
  }, [shape]);
  useEffect(() => {
    if (!plot.current) return;
    drawn.current = { shown, steps: all, smooth: smoothing > 0, axis, range };
    if (plot.current.data !== data) plot.current.setData(data);
    tell(plot.current);
  }, [data, shape]);

  const move = (event) => {
    const made = plot.current;
    const xs = made && made.data[0];
    if (!xs || !xs.length || event.ctrlKey || event.metaKey || event.altKey) return;
    const [least, most] = [xs.findIndex((x) => x >= range[0]), xs.findLastIndex((x) => x <= range[1])];
    const now = made.cursor.idx ?? most;
    const next = { ArrowLeft: Math.max(least, now - 1), ArrowRight: Math.min(most, now + 1), Home: least, End: most }[event.key];
    if (next !== undefined) {
      event.preventDefault();
      made.setCursor({ left: made.valToPos(xs[next], "x"), top: 10 }, true, true);
      spoken.current.textContent = tell(made);
    } else if (event.key === "Enter" && onStep) {
      const steps = stepsAt(shown, xs[now]);
      if (steps) onStep(steps[0], steps[1]);
    } else if ("+=-".includes(event.key)) {
      const half = (range[1] - range[0]) * (event.key === "-" ? 1 : 0.25);
      onZoom(xs[now] - half, xs[now] + half);
    }
  };
  const download = () => plot.current && save(picture(plot.current, sub ? `${title}: ${sub}` : title, about, shown), `${about}-${title}.png`.replace(/[^\p{L}\p{N}._-]+/gu, "_"));
  const toggle = (name) => setHidden(hidden.includes(name) ? hidden.filter((one) => one !== name) : [...hidden, name]);
  const entry = (one, i) => html`<i class="swatch" style=${{ background: sample(one.color ?? i) }} aria-hidden="true"></i> <span class="label">${one.label === title ? "" : one.label}</span>`;
  return html`<figure class="chart">
    <figcaption><h3>${title}</h3>${sub && html`<span class="sub">${sub}</span>`}</figcaption>
    <span class="tools">
      ${onLog && html`<button type="button" aria-pressed=${log} aria-label=${t("log_axis_of", { title })} title=${t("log_axis")} onClick=${onLog}>log</button>`}
      <button type="button" aria-label=${t("png_of", { title })} title=${t("png")} onClick=${download}>PNG</button>
      <a href=${csv} download=${`${title}.csv`} aria-label=${t("csv_of", { title })} title=${t("csv")}>CSV</a>
      ${onLarge && html`<button type="button" class="enlarge" aria-label=${t("enlarge_of", { title })} title=${t("enlarge")} onClick=${onLarge}><svg viewBox="0 0 16 16" aria-hidden="true"><path d="M9.5 2H14v4.5M14 2 9.2 6.8M6.5 14H2V9.5M2 14l4.8-4.8" /></svg></button>`}
    </span>
    <div class="plotted" style=${{ height: `${height}px` }}><div class="plot" ref=${box} tabindex="0" role="img" aria-label=${summary(sub ? `${title}, ${sub}` : title, shown, range)} onKeyDown=${move}></div><span class="at" ref=${at} hidden aria-hidden="true"></span></div>
    <ul class="legend" ref=${legend}>${series.map((one, i) => html`<li key=${one.name} title=${one.about || one.label}>
      ${series.length > 1 ? html`<button type="button" aria-pressed=${!hidden.includes(one.name)} onClick=${() => toggle(one.name)}>${entry(one, i)}</button>` : entry(one, i)}
      <span class="value" data-name=${one.name}></span></li>`)}</ul>
    <span class="hidden" role="status" ref=${spoken}></span>
  </figure>`;
}
