// Curves over steps. uPlot is the page's plain script.
import { html, useState, useEffect, useMemo, useRef, useThrottled, useLive, get, getCurves, number, link, visible, Failure } from "./lib.js";
import { t } from "./i18n.js";

const POINTS = 600;
const DASHES = [[], [6, 3], [2, 3], [9, 3, 2, 3], [12, 4], [4, 2]];

/** The colour's name and the dashes of a curve by its place: neither has to be told from the other's neighbours alone. */
const lookOf = (place) => ({ name: `--c${place % 8}`, dash: DASHES[place % DASHES.length] });

/** The same as a background, for legends and tables. */
export function sample(place) {
  const { name, dash } = lookOf(place);
  let end = 0;
  const parts = dash.map((length, i) => `${i % 2 ? "transparent" : `var(${name})`} ${end}px ${(end += length)}px`);
  return parts.length ? `repeating-linear-gradient(to right, ${parts.join(", ")})` : `var(${name})`;
}

/** What practitioners watch: a title and which metrics stand in it together.
 * @type {[string, (name: string) => boolean][]} */
export const CHARTS = [
  ["reward", (name) => name === "critic/score/mean" || /^reward\/.+\/mean$/.test(name)],
  ["accuracy", (name) => name === "train/accuracy" || name === "rewards/accuracies" || /^val-core\/.+\/acc\/mean@/.test(name) || /^eval\/.+_accuracy$/.test(name)],
  ["signal", (name) => /^by_group\/frac_(mixed|all_good|all_bad)$/.test(name)],
  ["loss", (name) => ["train/loss", "sft/nll_per_token", "reward_model/loss", "val/loss", "eval/loss", "eval/nll_per_token"].includes(name)],
  ["margins", (name) => /^rewards\/(margins|chosen|rejected)$/.test(name) || name === "eval/preference_margin"],
  ["length", (name) => name === "response_length/mean" || name === "response_length/max" || name === "val-aux/response_length/mean"],
  ["truncation", (name) => name === "response_length/clip_ratio" || name === "val-aux/truncated/mean"],
  ["entropy", (name) => name === "actor/entropy"],
  ["kl", (name) => name === "actor/ppo_kl" || name === "actor/kl_loss"],
  ["clip", (name) => name === "actor/pg_clipfrac"],
  ["gradient", (name) => name === "actor/grad_norm"],
  ["gap", (name) => name === "training/rollout_probs_diff_mean" || name === "training/rollout_probs_diff_max"],
  ["critic", (name) => name === "critic/vf_explained_var" || name === "critic/values/mean"],
  ["environment", (name) => /^environment\/(turns|replies)/.test(name) && name.split("/").length < 4],
  ["staleness", (name) => /^async\/staleness/.test(name)],
  ["phases", (name) => /^timing_s\//.test(name) && name !== "timing_s/step"],
  ["throughput", (name) => name === "perf/throughput"],
  ["memory", (name) => /^perf\/.*memory/.test(name)],
  ["rate", (name) => name === "actor/lr"],
];
export const FIRST = ["reward", "accuracy", "signal", "loss", "margins", "length", "entropy", "gradient"];

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Names of a chart, without what they all begin or end with. */
function labels(names) {
  if (names.length < 2) return names.map((name) => name.split("/").slice(-2).join("/"));
  return names.map((name) => name.replace(/^(by_group\/frac_|timing_s\/|critic\/|reward\/|val-core\/|training\/|response_length\/|actor\/|perf\/)/, "").replace("/mean@1", ""));
}

function summary(title, series) {
  const parts = series.map(({ label, x, y, low, high }) => t("curve_said", { label, first: number(y[0]), last: number(y[y.length - 1]), from: x[0], to: x[x.length - 1] }) + (low ? ` [${number(last(low))}, ${number(last(high))}]` : ""));
  return `${title}: ${parts.join("; ")}`;
}

/** What stands at an axis: with as many digits as tell its values apart. */
function ticks(_, values) {
  const gap = values.length > 1 ? Math.abs(values[1] - values[0]) : 0;
  const digits = gap ? Math.ceil(Math.log10(Math.max(...values.map(Math.abs)) / gap)) + 1 : 3;
  return values.map((value) => number(value, Math.max(3, Math.min(digits, 15))));
}

/** What a curve is drawn between: with some air, also where it is flat. */
function around(_, low, high) {
  if (low === null || high === null) return [0, 1];
  if (low === high) return [low - (Math.abs(low) / 10 || 0.5), high + (Math.abs(high) / 10 || 0.5)];
  return uPlot.rangeNum(low, high, 0.08, true);
}

function last(column) {
  for (let i = (column || []).length - 1; i >= 0; i--) if (column[i] !== null && column[i] !== undefined) return column[i];
  return null;
}

/** What uPlot draws of a curve: itself, and the edges of its range, which have no line and no place in the legend. */
function drawnOf(one, i) {
  const edge = { label: "", class: "edge", width: 0, spanGaps: true, points: { show: false } };
  const { name, dash } = lookOf(one.color ?? i);
  const itself = {
    label: one.label,
    stroke: color(name),
    width: 1.6,
    dash,
    spanGaps: true,
    points: { show: Boolean(one.dots) || one.x.length < 2, size: 6 },
    // Where no step is pointed at: the newest value.
    value: (self, value, place, at) => {
      const shown = (n) => number(at === null || at === undefined ? last(self.data[n]) : self.data[n][at]);
      return one.low ? `${shown(place)} [${shown(place + 2)}, ${shown(place + 1)}]` : shown(place);
    },
  };
  return one.low ? [itself, edge, edge] : [itself];
}

/** The ranges as uPlot fills them: between which of its series, and how. */
function rangesOf(series) {
  const found = [];
  let place = 1;
  series.forEach((one, i) => {
    if (one.low) found.push({ series: [place + 1, place + 2], fill: `${color(`--c${(one.color ?? i) % 8}`)}33` });
    place += one.low ? 3 : 1;
  });
  return found;
}

/** Draw flags of findings at their steps, and on the axis a diamond at each evaluation with what it found, where there is
 * room to write it. */
function marks(findings, evaluations) {
  return (plot) => {
    const { ctx, bbox } = plot;
    const unit = devicePixelRatio;
    const bottom = bbox.top + bbox.height;
    const right = bbox.left + bbox.width;
    ctx.save();
    for (const found of findings) {
      const x = plot.valToPos(found.step, "x", true);
      if (x < bbox.left || x > right) continue;
      ctx.strokeStyle = ctx.fillStyle = color(found.severity === "error" ? "--bad" : "--warn");
      ctx.setLineDash([3, 3]);
      ctx.lineWidth = unit;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bottom);
      ctx.stroke();
      ctx.setLineDash([]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x + 8 * unit, bbox.top + 4 * unit);
      ctx.lineTo(x, bbox.top + 8 * unit);
      ctx.fill();
    }
    ctx.font = `${10 * unit}px system-ui`;
    ctx.textAlign = "center";
    ctx.lineJoin = "round";
    ctx.setLineDash([]); // not those of the last curve
    const own = color("--text");
    const back = color("--card");
    let written = -Infinity;
    for (const { step, value } of evaluations) {
      // What was evaluated before the first step stands at it.
      const x = plot.valToPos(step || Math.min(1, plot.scales.x.min), "x", true);
      if (x < bbox.left - 1 || x > right + 1) continue;
      ctx.fillStyle = back;
      ctx.strokeStyle = own;
      ctx.lineWidth = 1.4 * unit;
      ctx.beginPath();
      for (const [across, up] of [[-5, 6], [0, 11], [5, 6], [0, 1]]) ctx.lineTo(x + across * unit, bottom - up * unit);
      ctx.closePath();
      ctx.fill();
      ctx.stroke();
      const half = ctx.measureText(number(value)).width / 2 + 3 * unit;
      const middle = Math.max(bbox.left + half, Math.min(right - half, x));
      if (middle - half < written) continue;
      written = middle + half;
      ctx.fillStyle = own;
      ctx.strokeStyle = back;
      ctx.lineWidth = 3 * unit;
      ctx.strokeText(number(value), middle, bottom - 14 * unit);
      ctx.fillText(number(value), middle, bottom - 14 * unit);
    }
    ctx.restore();
  };
}

/** What a run's evaluations are marked with: a metric's name, and its value at each of them. */
function evaluationsOf(run) {
  const judging = ["accuracy", "loss", "margins"].map((title) => CHARTS.find(([one]) => one === title)[1]);
  const name = judging.map((test) => run.evaluations.find((one) => test(one))).find(Boolean);
  const there = run.evaluated.map(({ step, values }) => ({ step, value: values[name] }));
  return { name, marked: there.filter(({ value }) => value !== null && value !== undefined) };
}

/**
 * @param {{title: string, series: {name: string, label: string, x: number[], y: number[], low?: number[], high?: number[], dots?: boolean, color?: number}[],
 *   findings?: any[], evaluations?: {step: number, value: number}[], onStep?: (step: number) => void, sync?: string, onZoom?: (from: number, to: number) => void, height?: number}} props
 */
export function Chart({ title, series, findings = [], evaluations = [], onStep, sync, onZoom, height = 170 }) {
  const box = useRef(null);
  const plot = useRef(null);
  const calls = useRef({ onStep, onZoom });
  calls.current = { onStep, onZoom };
  const [dark, setDark] = useState(0);
  const shape = JSON.stringify([series.map((one) => [one.name, one.label, one.dots, one.color, Boolean(one.low)]), findings.map((found) => found.step), evaluations, dark]);
  const data = useMemo(() => {
    if (!series.length) return [[]];
    const tables = series.map((one) => (one.low ? [one.x, one.y, one.high, one.low] : [one.x, one.y]));
    return tables.length === 1 ? tables[0] : uPlot.join(tables);
  }, [series]);
  useEffect(() => {
    const again = () => setDark((n) => n + 1);
    const media = matchMedia("(prefers-color-scheme: dark)");
    addEventListener("theme", again);
    media.addEventListener("change", again);
    return () => {
      removeEventListener("theme", again);
      media.removeEventListener("change", again);
    };
  }, []);
  useEffect(() => {
    const node = box.current;
    const text = color("--faint");
    const samples = ["", ...series.flatMap((one, i) => (one.low ? [sample(one.color ?? i), "", ""] : [sample(one.color ?? i)]))];
    const axis = { stroke: text, grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const made = new uPlot(
      {
        width: Math.max(120, node.clientWidth),
        height,
        legend: { live: true, markers: { width: 0, fill: (_, i) => samples[i] || "none" } },
        cursor: { y: false, sync: sync ? { key: sync } : undefined, focus: { prox: 16 }, drag: { x: true, y: false } },
        scales: { x: { time: false }, y: { range: around } },
        axes: [{ ...axis, size: 26, gap: 2 }, { ...axis, size: 52, gap: 3, values: ticks }],
        series: [
          { label: t("step"), value: (_, value) => (value === null || value === undefined ? "" : String(value)) },
          ...series.flatMap(drawnOf),
        ],
        bands: rangesOf(series),
        hooks: {
          draw: [marks(findings, evaluations)],
          setSelect: [
            (self) => {
              const { left, width } = self.select;
              if (width > 4 && calls.current.onZoom) calls.current.onZoom(self.posToVal(left, "x"), self.posToVal(left + width, "x"));
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
    made.over.addEventListener("click", () => {
      const index = made.cursor.idx;
      if (!moved && index !== null && index !== undefined && calls.current.onStep) calls.current.onStep(made.data[0][index]);
    });
    made.over.addEventListener("dblclick", () => calls.current.onZoom && calls.current.onZoom(0, 2 ** 52));
    const watch = new ResizeObserver(() => node.clientWidth && Math.abs(node.clientWidth - made.width) > 1 && made.setSize({ width: node.clientWidth, height }));
    watch.observe(node);
    return () => {
      watch.disconnect();
      made.destroy();
    };
  }, [shape]);
  useEffect(() => {
    if (plot.current && plot.current.data !== data) plot.current.setData(data);
  }, [data, shape]);
  const move = (event) => {
    const made = plot.current;
    const steps = made && made.data[0];
    if (!steps || !steps.length) return;
    const now = made.cursor.idx ?? steps.length - 1;
    const next = { ArrowLeft: Math.max(0, now - 1), ArrowRight: Math.min(steps.length - 1, now + 1), Home: 0, End: steps.length - 1 }[event.key];
    if (next !== undefined) {
      event.preventDefault();
      made.setCursor({ left: made.valToPos(steps[next], "x"), top: 10 });
    } else if (event.key === "Enter" && onStep) onStep(steps[now]);
    else if ("+=-".includes(event.key)) {
      const { min, max } = made.scales.x;
      const half = ((max - min) / 2) * (event.key === "-" ? 2 : 0.5);
      if (event.key === "-" && min <= steps[0] && max >= steps[steps.length - 1]) return onZoom && onZoom(0, 2 ** 52);
      const [from, to] = [steps[now] - half, steps[now] + half];
      if (onZoom) onZoom(from, to);
      else made.setScale("x", { min: Math.max(steps[0], from), max: Math.min(steps[steps.length - 1], to) });
    }
  };
  return html`<figure class="chart">
    <figcaption>${title}</figcaption>
    <div ref=${box} class="plot" tabindex="0" role="img" aria-label=${summary(title, series)} onKeyDown=${move}></div>
  </figure>`;
}

/** The curves of a run as they come: {train, eval: Map(name -> {x, y})}, kept up to date. */
export function useCurves(id, names, range) {
  const [curves, setCurves] = useState(null);
  const [error, setError] = useState(null);
  const own = useRef({ names: "", busy: false, again: false });
  const key = names.join("\n");
  const load = async () => {
    if (!names.length) return setCurves({ step: 0, train: new Map(), eval: new Map(), evaluations: 0, resumed: 0 });
    try {
      const found = await getCurves(id, names, POINTS, Math.floor(range[0]), Math.ceil(range[1]));
      if (own.current.names === `${id}\n${key}\n${range}`) setCurves(found);
      setError(null);
    } catch (failure) {
      setError(failure);
    }
  };
  const tail = async () => {
    if (!curves) return;
    if (own.current.busy) {
      own.current.again = true;
      return;
    }
    own.current.busy = true;
    try {
      const found = await get(`/api/runs/${id}/tail?after=${curves.step}&resumed=${curves.resumed}`);
      const longest = Math.max(0, ...[...curves.train.values()].map((curve) => curve.x.length));
      if (found.rewritten || longest > 3 * POINTS || range[1] < 2 ** 52) await load();
      else if (found.steps.length || found.evaluations !== curves.evaluations) {
        const train = new Map(curves.train);
        for (const name of names) {
          const added = found.columns[name];
          if (!added) continue;
          const old = train.get(name) || { x: [], y: [] };
          const there = found.steps.map((step, i) => [step, added[i]]).filter(([, value]) => value !== null);
          train.set(name, { x: [...old.x, ...there.map(([step]) => step)], y: [...old.y, ...there.map(([, value]) => value)] });
        }
        const evaluations = found.evaluations === curves.evaluations ? curves.eval : (await getCurves(id, names, POINTS)).eval;
        setCurves({ ...curves, step: found.steps[found.steps.length - 1] ?? curves.step, train, eval: evaluations, evaluations: found.evaluations });
      }
    } catch (failure) {
      setError(failure);
    } finally {
      own.current.busy = false;
      if (own.current.again) soon(); // with the curves as they are by then
      own.current.again = false;
    }
  };
  useEffect(() => {
    own.current.names = `${id}\n${key}\n${range}`;
    load();
  }, [id, key, range[0], range[1]]);
  const soon = useThrottled(tail, 300);
  useLive((name, ids) => {
    if ((name === "changed" && ids.includes(id)) || name === "ready") soon();
  });
  return [curves, error];
}

export function chartSeries(curves, names) {
  const found = [];
  const parts = names.filter((name) => /^reward\//.test(name));
  const used = parts.length === 1 ? names.filter((name) => name !== parts[0]) : names;
  const said = labels(used);
  used.forEach((name, i) => {
    for (const [table, dots] of [[curves.train, false], [curves.eval, true]]) {
      const curve = table.get(name);
      if (curve && curve.x.length) found.push({ name: `${name}${dots}`, label: dots ? `${said[i]} (${t("held_out")})` : said[i], dots, ...curve });
    }
  });
  return found;
}

export function Charts({ run, which, all }) {
  const [range, setRange] = useState([0, 2 ** 52]);
  const names = useMemo(() => [...new Set([...run.metrics, ...run.evaluations])], [run.metrics.length, run.evaluations.length, run.id]);
  const groups = useMemo(() => {
    const taken = new Set();
    const found = [];
    for (const [title, test] of CHARTS) {
      const own = names.filter((name) => test(name));
      if (own.length && (!which || which.includes(title))) found.push([t(`chart_${title}`), own]);
      own.forEach((name) => taken.add(name));
    }
    if (all) names.filter((name) => !taken.has(name) && name !== "timing_s/step").forEach((name) => found.push([name, [name]]));
    return found;
  }, [names, which, all]);
  const wanted = useMemo(() => [...new Set(groups.flatMap(([, own]) => own))], [groups]);
  const [curves, error] = useCurves(run.id, wanted, range);
  // Of the same curves the same series: a chart is drawn anew only where it has something new.
  const drawn = useMemo(() => (curves ? groups.map(([title, own]) => [title, chartSeries(curves, own)]) : []), [curves, groups]);
  const open = (step) => {
    location.hash = link(["run", run.id, "rollouts"], new URLSearchParams({ first_step: step, last_step: step })).slice(1);
  };
  const { name, marked } = evaluationsOf(run);
  if (!curves) return html`<${Failure} error=${error} />`;
  return html`<${Failure} error=${error} />
    ${range[1] < 2 ** 52 && html`<p><button onClick=${() => setRange([0, 2 ** 52])}>${t("whole_run")}</button></p>`}
    ${marked.length > 0 && html`<p class="faint">${visible(t("evaluations_marked", { name }))}<span class="hidden">: ${marked.map(({ step, value }) => `${t("step")} ${step} ${number(value)}`).join(", ")}</span></p>`}
    <div class="charts">${drawn.map(([title, series]) => {
      return series.length > 0 && html`<${Chart} key=${title} title=${title} series=${series} findings=${run.findings} evaluations=${marked} onStep=${open} sync=${run.id} onZoom=${(from, to) => setRange([Math.max(0, from), to])} />`;
    })}</div>`;
}
