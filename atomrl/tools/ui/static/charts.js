// The charts of a run. The address contains their settings: ?x=tokens&smooth=0.6&find=kl&log=loss&from=10&to=90&chart=loss
import { html, useState, useEffect, useMemo, useRef, link, place, visible, plainText, Failure, Loading, number } from "./lib.js";
import { t } from "./i18n.js";
import { Chart } from "./plot.js";
import { arranged, labels, matches, otherName } from "./panels.js";
import { useCurves, interpolated, POINTS, WHOLE } from "./curves.js";

const FINE = 1500;
const MOST_SMOOTH = 0.99;
export const AXES = ["step", "time", "tokens"];

/** Default settings of a page: those of the previous one. */
let remembered = {};

function viewNow(kept) {
  const { query } = place();
  const steps = (name, other) => (/^\d{1,15}$/.test(query.get(name) ?? "") ? Number(query.get(name)) : other);
  const smooth = Number(query.get("smooth") ?? kept.smooth ?? 0);
  const x = query.get("x") ?? kept.x;
  return {
    x: AXES.includes(x) ? x : "step", smooth: smooth > 0 ? Math.min(smooth, MOST_SMOOTH) : 0, find: query.get("find") ?? "",
    log: query.getAll("log"), range: [steps("from", WHOLE[0]), steps("to", WHOLE[1])], chart: query.get("chart"), all: query.get("all") === "1",
  };
}

/**
 * The settings of the charts, read from the address, and a function that changes them. `tools`: the page has controls.
 * @returns {[ReturnType<typeof viewNow>, (changes: Partial<ReturnType<typeof viewNow>>) => void]}
 */
export function useView(tools) {
  const [view, setView] = useState(() => viewNow(tools ? remembered : {}));
  const timer = useRef(0);
  useEffect(() => {
    const moved = () => setView(viewNow(tools ? remembered : {}));
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  const page = place().path.slice(0, 3).join("/");
  useEffect(() => {
    if (tools) remembered = { x: view.x, smooth: view.smooth };
    clearTimeout(timer.current);
    timer.current = setTimeout(() => {
      const { path, query } = place();
      if (path.slice(0, 3).join("/") !== page) return; // the user has left the page
      const said = {
        x: view.x !== "step" && view.x, smooth: view.smooth > 0 && String(view.smooth), find: view.find,
        from: view.range[0] > WHOLE[0] && String(view.range[0]), to: view.range[1] < WHOLE[1] && String(view.range[1]), chart: view.chart, all: view.all && "1",
      };
      for (const [name, value] of Object.entries(said)) value ? query.set(name, String(value)) : query.delete(name);
      query.delete("log");
      view.log.forEach((id) => query.append("log", id));
      const next = link(path, query);
      if (next !== location.hash) history.replaceState(history.state, "", next);
    }, 150); // browsers limit how often the address may change
  }, [view]);
  useEffect(() => () => clearTimeout(timer.current), []);
  return [view, (changes) => setView((old) => ({ ...old, ...changes }))];
}

export const toggled = (list, one) => (list.includes(one) ? list.filter((other) => other !== one) : [...list, one]);

/** Controls of all charts of a page: search, x-axis, smoothing. */
export function Tools({ view, change, clocks, find = true, children = null }) {
  return html`<div class="bar charttools" role="group" aria-label=${t("charts")}>
    ${find && html`<label class="find"><span class="hidden">${t("find_charts")}</span><input type="search" placeholder=${t("find_charts")} value=${view.find} onInput=${(event) => change({ find: event.target.value })} /></label>`}
    ${clocks.length > 0 && html`<label>${t("axis")} <select value=${view.x} onChange=${(event) => change({ x: event.target.value, range: WHOLE })}>
      ${AXES.filter((name) => name === "step" || clocks.includes(name)).map((name) => html`<option value=${name}>${t(`axis_${name}`)}</option>`)}</select></label>`}
    <label class="smooth" title=${t("smoothing_about")}>${t("smoothing")} <input type="range" min="0" max=${MOST_SMOOTH} step="0.01" value=${view.smooth} onInput=${(event) => change({ smooth: Number(event.target.value) })} />
      <output>${view.smooth.toFixed(2)}</output></label>
    ${children}
    ${view.range[1] < WHOLE[1] && html`<button type="button" onClick=${() => change({ range: WHOLE })}>${t("whole_run")}</button>`}
  </div>`;
}

/** A chart enlarged to the window. */
export function Large({ title, close, children }) {
  const box = useRef(null);
  const [height, setHeight] = useState(innerHeight);
  useEffect(() => {
    const node = box.current;
    const before = document.activeElement;
    const resized = () => setHeight(innerHeight);
    node.showModal();
    node.focus();
    addEventListener("resize", resized);
    return () => {
      removeEventListener("resize", resized);
      node.close();
      if (before instanceof HTMLElement) before.focus();
    };
  }, []);
  return html`<dialog class="large" tabindex="-1" ref=${box} aria-label=${title} onCancel=${(event) => { event.preventDefault(); close(); }}>
    <button type="button" class="close" onClick=${close}>${t("close")} <kbd>Esc</kbd></button>
    ${children(Math.max(200, height - 210))}</dialog>`;
}

/** Constant metrics, as numbers instead of charts. */
export function Flat({ metrics, open }) {
  if (!metrics.length) return null;
  return html`<details class="flat" open=${open}><summary>${t("flat_metrics", { n: metrics.length })}</summary>
    <dl>${metrics.map(([name, value]) => html`<div key=${name}><dt>${visible(name)}</dt><dd>${number(value)}</dd></div>`)}</dl></details>`;
}

/** The curves of a panel on an axis. */
function seriesOf(curves, panel, axis) {
  const found = [];
  const said = labels(panel.metrics.map(({ name }) => name));
  panel.metrics.forEach(({ name, also }, i) => {
    for (const [table, dots] of [[curves.train, false], [curves.eval, true]]) {
      const column = table.columns.get(name);
      const xs = axis === "step" ? table.axis.last : table.axis[axis];
      if (!column || !xs || !column.mean.some((value) => value !== null)) continue;
      const label = [said[i], ...also.map((one) => otherName(name, one))].join(" = ");
      const own = { name: `${name} ${dots}`, label: plainText(dots && curves.train.columns.has(name) ? t("held_out_of", { name: label }) : label), about: [name, ...also].join(" = "), first: table.axis.first, last: table.axis.last, dots };
      const band = table.per > 1 ? { low: column.low, high: column.high } : {};
      // Evaluations have their own rows. A missing value in them is not a gap in the curve.
      const there = (_, k) => !dots || column.mean[k] !== null;
      found.push(dots ? { ...own, x: xs.filter(there), y: column.mean.filter(there), first: own.first.filter(there), last: own.last.filter(there) } : { ...own, x: xs, y: column.mean, ...band });
    }
  });
  return found;
}

/** Convert steps to positions on an axis, and back, by the run's own clock. */
function clockOf(curves, axis) {
  if (axis === "step" || !curves) return { to: (step) => step, back: (x) => x };
  const [steps, xs] = [curves.train.axis.last, curves.train.axis[axis]].map((column) => [0, ...column]);
  return { to: (step) => interpolated(steps, xs, step), back: (x) => interpolated(xs, steps, x) };
}

/** The visible range of the axis: everything, or the zoomed steps. */
function rangeOf(curves, axis, looked, clock) {
  const ends = [curves.train, curves.eval].map(({ axis: own }) => own[axis === "step" ? "last" : axis] || []).filter((xs) => xs.length);
  let from = Math.min(...ends.map((xs) => xs[0]));
  let to = Math.max(...ends.map((xs) => xs[xs.length - 1]));
  if (axis !== "step") from = 0;
  if (looked[1] < WHOLE[1]) [from, to] = [clock.to(looked[0]), clock.to(looked[1])];
  return from < to ? [from, to] : [from - 0.5, from + 0.5];
}

/** One panel, drawn with the curves loaded so far. */
function Panel({ run, panel, curves, axis, view, change, height, large }) {
  const clock = useMemo(() => clockOf(curves, axis), [curves, axis]);
  const series = useMemo(() => seriesOf(curves, panel, axis), [curves, panel, axis]);
  const steps = useMemo(() => ({ ...curves.train.axis, x: (axis === "step" ? curves.train.axis.last : curves.train.axis[axis]) || [] }), [curves, axis]);
  const range = rangeOf(curves, axis, view.range, clock);
  if (!series.length) return null;
  const title = plainText(panel.titles.join(" = "));
  const open = (first, last) => (location.hash = link(["run", run.id, "rollouts"], new URLSearchParams({ first_step: String(first), last_step: String(last) })).slice(1));
  const zoom = (from, to) => {
    let steps = [clock.back(from), clock.back(to)];
    if (to - from > range[1] - range[0]) { // zoomed out beyond the loaded curves
      const [low, high] = view.range[1] < WHOLE[1] ? view.range : [0, run.step];
      steps = [low - (high - low) / 2, high + (high - low) / 2];
    }
    const [low, high] = [Math.max(0, Math.floor(steps[0])), Math.ceil(steps[1])];
    change({ range: low <= 1 && high >= run.step ? WHOLE : [low, high] });
  };
  const keys = panel.metrics.flatMap(({ name, also }) => [name, ...also]);
  return html`<${Chart} title=${title} about=${plainText(run.name)} series=${series} steps=${steps} axis=${axis} range=${range} smoothing=${view.smooth} log=${view.log.includes(panel.id)}
    onLog=${() => change({ log: toggled(view.log, panel.id) })} flags=${run.findings.map((found) => ({ x: clock.to(found.step), severity: found.severity }))}
    onStep=${open} onZoom=${zoom} onWhole=${() => change({ range: WHOLE })} onLarge=${large && (() => change({ chart: panel.id }))} sync=${run.id + axis}
    csv=${`/api/compare/curves.csv?${new URLSearchParams({ runs: run.id, keys: keys.join("\n") })}`} height=${height} />`;
}

function LargePanel({ run, panel, curves, axis, view, change }) {
  const names = useMemo(() => panel.metrics.map(({ name }) => name), [panel]);
  const [fine] = useCurves(run.id, names, view.range, FINE);
  const close = () => change({ chart: null });
  return html`<${Large} title=${panel.titles.join(" = ")} close=${close}>${(height) => html`
    <${Tools} view=${view} change=${change} clocks=${run.clocks} find=${false} />
    <${Panel} run=${run} panel=${panel} curves=${fine || curves} axis=${axis} view=${view} change=${change} height=${height} />
    <${Stretches} curves=${fine || curves} />`}</${Large}>`;
}

/** A note on how many steps a point stands for, if more than one. */
function Stretches({ curves }) {
  const { per, axis } = curves.train;
  return per > 1 && html`<p class="faint hint">${t("stretches", { n: (axis.last[axis.last.length - 1] - axis.first[0] + 1).toLocaleString("en"), per })}</p>`;
}

/** The charts of a run: the key ones, or with `all` every metric, with controls. */
export function Charts({ run, all }) {
  const [view, change] = useView(all);
  const { panels, flat } = useMemo(() => arranged({ names: [...new Set([...run.metrics, ...run.evaluations])], constant: run.constant, alike: run.alike }),
    [JSON.stringify([run.metrics, run.evaluations, run.alike, Object.keys(run.constant)]), run.id]);
  const drawn = useMemo(() => panels.filter(({ first }) => all || first), [panels, all]);
  const wanted = useMemo(() => drawn.flatMap(({ metrics }) => metrics.map(({ name }) => name)), [drawn]);
  const [curves, error] = useCurves(run.id, wanted, view.range, POINTS);
  if (!curves) return error ? html`<${Failure} error=${error} />` : html`<${Loading} />`;
  const axis = run.clocks.includes(view.x) ? view.x : "step";
  const find = all ? view.find : "";
  const found = drawn.filter(({ titles, metrics }) => matches(find, [...titles, ...metrics.flatMap(({ name, also }) => [name, ...also])]));
  const still = all ? flat.filter(([name]) => matches(find, [name])) : [];
  const sections = [...new Set(found.map(({ section }) => section))];
  const large = view.chart !== null && drawn.find(({ id }) => id === view.chart);
  const draw = (panel) => html`<${Panel} key=${panel.id} run=${run} panel=${panel} curves=${curves} axis=${axis} view=${view} change=${change} large=${true} height=${180} />`;
  return html`<${Failure} error=${error} />
    ${all ? html`<${Tools} view=${view} change=${change} clocks=${run.clocks} />` : view.range[1] < WHOLE[1] && html`<p><button type="button" onClick=${() => change({ range: WHOLE })}>${t("whole_run")}</button></p>`}
    ${all && html`<p class="faint hint pointing">${t("charts_hint")}</p>`}
    <${Stretches} curves=${curves} />
    ${all ? sections.map((section) => html`<details class="section" open key=${section}><summary><h2>${t(`section_${section}`)}</h2> <span class="count">${found.filter((one) => one.section === section).length}</span></summary>
        <div class="charts">${found.filter((one) => one.section === section).map(draw)}</div></details>`)
      : html`<div class="charts">${found.map(draw)}</div>`}
    <${Flat} metrics=${still} open=${Boolean(find)} />
    ${all && !found.length && !still.length && html`<p class="empty">${t("nothing_found")}</p>`}
    ${large && html`<${LargePanel} key=${large.id} run=${run} panel=${large} curves=${curves} axis=${axis} view=${view} change=${change} />`}`;
}
