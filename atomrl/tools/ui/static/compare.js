// Comparison of runs: results, curves, config differences, held-out answers.
import { html, get, useState, useMemo, useEffect, useGet, useKept, number, link, Status, Failure, Loading, visible, plainText } from "./lib.js";
import { t } from "./i18n.js";
import { findingName } from "./findings.js";
import { useView, Tools, Large, Flat, toggled } from "./charts.js";
import { interpolated, WHOLE } from "./curves.js";
import { apartFrom, matches, otherName } from "./panels.js";
import { Chart, sample } from "./plot.js";

/** Groups of runs that the table and the charts show together: the seeds of a config, or single runs. */
function groupsOf(found, grouped) {
  const groups = grouped ? found.groups : found.runs.map((_, i) => [i]);
  return groups.map((members, color) => ({ members, color, name: members.length > 1 ? `${found.group_names[color]} ×${members.length}` : found.runs[members[0]].name }));
}

/** The curve of a metric for each group: that of its run, or mean and range of its runs. */
function seriesOf(found, metric, groups, axis) {
  const dots = found.evaluations.includes(metric);
  const placed = (members, steps) => {
    if (axis === "step") return steps;
    const clocks = members.map((i) => found.clocks[i]).filter((clock) => clock[axis]).map((clock) => [[0, ...clock.steps], [0, ...clock[axis]]]);
    return clocks.length && steps.map((step) => clocks.reduce((sum, [own, xs]) => sum + interpolated(own, xs, step), 0) / clocks.length);
  };
  return groups.map(({ members, color, name }) => {
    const about = { name, label: plainText(name), color, dots };
    const band = members.length > 1 ? found.bands[metric][color] : null;
    const curve = found.curves[metric][members[0]];
    const drawn = band ? { x: band.steps, y: band.mean, low: band.low, high: band.high } : members.length === 1 && curve;
    const x = drawn && placed(members, drawn.x);
    if (!x) return null;
    const kept = (values) => (dots && values ? values.filter((_, i) => drawn.y[i] !== null) : values);
    return { ...about, x: kept(x), y: kept(drawn.y), low: kept(drawn.low), high: kept(drawn.high), first: kept(drawn.x), last: kept(drawn.x) };
  }).filter(Boolean);
}

/** The title of a column. */
function columnTitle(title) {
  const said = t(`judged_${title}`);
  return said.startsWith("judged_") ? visible(title) : said;
}

function range(found) {
  return found === null ? "–" : html`${number(found[0])} <small class="nowrap">[${number(found[1])}, ${number(found[2])}]</small>`;
}

/** Table of the runs' results. Runs that differ only in their seeds share a row. */
function Judged({ found, groups }) {
  const { runs, columns } = found;
  const row = (i, color) => html`<tr key=${runs[i].id}><th scope="row"><span class="swatch" style=${{ background: sample(color) }} aria-hidden="true"></span> <a href=${link(["run", runs[i].id])}>${visible(runs[i].name)}</a></th>
    <td><${Status} status=${runs[i].status} /></td><td class="nowrap">${runs[i].step}${runs[i].steps ? ` / ${runs[i].steps}` : ""}</td>
    ${columns.map((column) => html`<td>${number(column.values[i])}</td>`)}
    <td>${runs[i].findings.map((one) => findingName(one.id)).join(", ") || t("none")}</td></tr>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${t("runs")}><table class="judged">
    <thead><tr><th scope="col">${t("name")}</th><th scope="col">${t("status")}</th><th scope="col">${t("step")}</th>${columns.map((one) => html`<th scope="col">${columnTitle(one.title)}</th>`)}<th scope="col">${t("findings")}</th></tr></thead>
    ${groups.map(({ members, color, name }) => html`<tbody key=${name}>${members.map((i) => row(i, color))}
      ${members.length > 1 && html`<tr class="group"><th scope="row" colspan="3">${t("mean_of_seeds", { name, seeds: members.map((i) => runs[i].seed ?? "?").join(", ") })}</th>
        ${columns.map((column) => html`<td>${range(column.over[color])}</td>`)}<td></td></tr>`}</tbody>`)}</table></div>`;
}

/** Differences between groups of seeds in the first figure, as printed by `atomrl compare`, with their intervals drawn. */
function Differences({ pairs }) {
  const ends = [0, ...pairs.flatMap(({ difference: { low, high } }) => [low, high])];
  const [least, most] = [Math.min(...ends), Math.max(...ends)];
  const across = (value) => 6 + (188 * (value - least)) / (most - least || 1);
  const signed = (value) => `${value > 0 ? "+" : value < 0 ? "−" : ""}${number(Math.abs(value))}`;
  return html`<section class="apart" aria-label=${t("difference")}><h2>${t("difference")} <small>${t("difference_about", { title: columnTitle(pairs[0].title) })}</small></h2>
    <ul>${pairs.map(({ first, second, clear, difference: { gain, low, high, counts: [a, b], seeds_needed: needed } }) => html`<li key=${`${second}-${first}`} class=${clear ? "clear" : ""}>
      <span class="pair"><b>${visible(second)}</b> − <b>${visible(first)}</b></span>
      <svg viewBox="0 0 200 20" aria-hidden="true"><line class="zero" x1=${across(0)} x2=${across(0)} y1="0" y2="20" /><line class="interval" x1=${across(low)} x2=${across(high)} y1="10" y2="10" /><circle cx=${across(gain)} cy="10" r="4.5" /></svg>
      <span class="amount">= ${signed(gain)} <span class="nowrap">[95% ${signed(low)} ${t("to")} ${signed(high)}]</span>, <span class="nowrap">${a === b ? t("seeds_n", { n: a }) : t("seeds_and", { a, b })}</span>: <b>${clear ? t("told_apart") : t("not_told_apart")}</b>${!clear && needed !== null && `; ${t("seeds_needed", { n: needed })}`}</span></li>`)}</ul></section>`;
}

/** A name with line break opportunities between its parts. */
const broken = (name) => name.split(/(?<=[_=/])|(?<=\.)(?!\d)/).map((part) => [visible(part), html`<wbr />`]);

/** Table of config keys. The runs of a group share a column; if they differ, as in their seeds, it lists all values. */
function Keys({ groups, rows, title }) {
  const said = (value) => (value === null ? "–" : visible(JSON.stringify(value)));
  const cell = (values, members) => {
    const own = members.map((i) => values[i]);
    return own.every((value) => JSON.stringify(value) === JSON.stringify(own[0])) ? said(own[0]) : own.map((value, i) => [i ? ", " : "", said(value)]);
  };
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${title}><table>
    <thead><tr><th scope="col">${t("key")}</th>${groups.map(({ name }) => html`<th scope="col">${broken(name)}</th>`)}</tr></thead>
    <tbody>${rows.map(([key, values]) => html`<tr><th scope="row"><code>${broken(key)}</code></th>${groups.map(({ members }) => html`<td><code>${cell(values, members)}</code></td>`)}</tr>`)}</tbody>
  </table></div>`;
}

/** The first difference between two of the runs, as in `atomrl compare --diff`. */
function Difference({ runs }) {
  const [pair, setPair] = useState([0, 1]);
  const [found, setFound] = useState(null);
  const [error, setError] = useState(null);
  const ask = async () => {
    setFound("asking");
    setError(null);
    try {
      setFound(await get(`/api/compare/difference?runs=${pair.map((i) => runs[i].id).join(",")}`));
    } catch (failure) {
      setFound(null);
      setError(failure);
    }
  };
  const choose = (which) => (event) => {
    setFound(null);
    setPair(pair.map((one, i) => (i === which ? Number(event.target.value) : one)));
  };
  return html`<h2>${t("first_difference")}</h2>
    <p class="bar">${["A", "B"].map((name, which) => html`<label>${name} <select value=${pair[which]} onChange=${choose(which)}>${runs.map((run, i) => html`<option value=${i}>${visible(run.name)}</option>`)}</select></label>`)}
      <button onClick=${ask} disabled=${found === "asking" || pair[0] === pair[1]}>${t("find_it")}</button></p>
    <div role="status">${found === "asking" ? html`<p class="loading">${t("loading")}</p>` : found && html`
      <p class="first">${found.same ? t("all_the_same") : found.first ? t("differs_first", { step: found.first.step, part: found.first.part }) : t("differs_before")}
        ${found.first && found.first.split && html` ${pair.map((i, which) => html` <a href=${link(["run", runs[i].id, "rollouts"], new URLSearchParams({ first_step: found.first.step, last_step: found.first.step, split: found.first.split }))}>${t("its_step", { name: ["A", "B"][which] })}</a>`)}`}</p>
      <pre class="text page" tabindex="0">${visible(found.lines.join("\n"))}</pre>`}</div><${Failure} error=${error} />`;
}

/** Answers of each run to the same held-out prompts, at its newest evaluation. */
function Answers({ runs, ids }) {
  const [differing, setDiffering] = useState(true);
  const [offset, setOffset] = useState(0);
  const [found, error] = useGet(`/api/compare/answers?runs=${ids.join(",")}&differing=${differing}&offset=${offset}`, ids);
  if (!found) return error ? html`<${Failure} error=${error} />` : html`<${Loading} />`;
  if (found.steps.every((step) => step === null)) return html`<h2>${t("answers")}</h2><p class="empty">${t("no_answers")}</p>`;
  return html`<div class="bar"><h2>${t("answers")}</h2>
      <label><input type="checkbox" checked=${differing} onChange=${(event) => { setOffset(0); setDiffering(event.target.checked); }} /> ${t("only_differing")}</label>
      <button disabled=${offset === 0} onClick=${() => setOffset(Math.max(0, offset - found.page))}>${t("before")}</button>
      <span>${t("n_prompts", { n: found.total })}</span>
      <button disabled=${offset + found.page >= found.total} onClick=${() => setOffset(offset + found.page)}>${t("next")}</button></div>
    ${found.rows.length ? html`<div class="scroll" tabindex="0" role="region" aria-label=${t("answers")}><table class="answers">
      <thead><tr><th scope="col">${t("prompt")}</th>${runs.map((run, i) => html`<th scope="col">${visible(run.name)} ${found.steps[i] !== null && html`<small>${t("step_no", { n: found.steps[i] })}</small>`}</th>`)}</tr></thead>
      <tbody>${found.rows.map((row) => {
        const asked = row.find(Boolean) || {};
        const truth = asked.ground_truth;
        return html`<tr><th scope="row"><pre class="text" tabindex="0" aria-label=${t("prompt")}>${visible((asked.prompt || "").slice(-400))}</pre>${truth !== null && truth !== undefined && html`<small>${t("ground_truth")}: <code>${visible(typeof truth === "string" ? truth : JSON.stringify(truth))}</code></small>`}</th>
          ${row.map((one, i) => html`<td>${one ? html`<p><a href=${link(["run", runs[i].id, "rollouts", ...one.at.map(String)])}>${t("reward")} ${number(one.mean)}</a></p><pre class="text" tabindex="0" aria-label=${t("completion")}>${visible(one.completion.slice(0, 600))}</pre>` : "–"}</td>`)}</tr>`;
      })}</tbody></table></div>` : html`<p class="empty">${differing ? t("all_answers_alike") : t("nothing_found")}</p>`}`;
}

/** One metric of all runs. */
function Metric({ found, panel, groups, steps, axis, view, change, ids, height, large }) {
  const series = useMemo(() => seriesOf(found, panel.id, groups, axis), [found, panel.id, groups, axis]);
  const drawn = series.filter(({ y }) => y.some((value) => value !== null));
  if (!drawn.length) return null;
  const sub = [panel.id, ...panel.also.map((name) => otherName(panel.id, name))].join(" = ");
  const range = axis === "step" && view.range[1] < WHOLE[1] ? view.range : wholeOf(drawn, axis);
  const zoom = (from, to) => {
    const [low, high] = wholeOf(drawn, axis);
    if (axis === "step") change({ range: from <= low && to >= high ? WHOLE : [Math.max(0, Math.floor(from)), Math.ceil(to)] });
  };
  return html`<${Chart} title=${plainText(panel.title)} sub=${plainText(sub === panel.title ? "" : sub)} about=${plainText(groups.map(({ name }) => name).join(", "))} series=${drawn} steps=${steps} axis=${axis} range=${range} smoothing=${view.smooth} log=${view.log.includes(panel.id)}
    onLog=${() => change({ log: toggled(view.log, panel.id) })} onZoom=${zoom} onWhole=${() => change({ range: WHOLE })} onLarge=${large && (() => change({ chart: panel.id }))} sync=${`compare${axis}`}
    csv=${`/api/compare/curves.csv?${new URLSearchParams({ runs: ids.join(","), keys: [panel.id, ...panel.also].join("\n") })}`} height=${height} />`;
}

/** The training steps of the longest curve, and their positions on the axis. */
function stepsOf(found, panels, groups, axis) {
  const panel = panels.find(({ id }) => !found.evaluations.includes(id));
  const series = panel ? seriesOf(found, panel.id, groups, axis) : [];
  const most = series.reduce((kept, one) => (one.x.length > kept.x.length ? one : kept), { x: [], first: [], last: [] });
  return { x: most.x, first: most.first, last: most.last };
}

function wholeOf(series, axis) {
  const from = axis === "step" ? Math.min(...series.map(({ x }) => x[0])) : 0;
  const to = Math.max(...series.map(({ x }) => x[x.length - 1]));
  return from < to ? [from, to] : [from - 0.5, from + 0.5];
}

export function Compare({ ids }) {
  const [view, change] = useView(true);
  const [found, error] = useGet(`/api/compare?runs=${ids.join(",")}&all=${view.all}`, ids);
  const [grouped, setGrouped] = useKept("compare-grouped", "yes");
  useEffect(() => {
    document.title = `${t("compare")} · AtomRL`;
  }, []);
  const groups = useMemo(() => (found ? groupsOf(found, grouped === "yes") : []), [found, grouped]);
  const panels = useMemo(() => (found ? apartFrom({ names: Object.keys(found.curves), constant: found.constant, alike: found.alike }) : []), [found]);
  const clocks = found ? ["time", "tokens"].filter((name) => found.clocks.some((clock) => clock[name])) : [];
  const axis = clocks.includes(view.x) ? view.x : "step";
  const steps = useMemo(() => stepsOf(found, panels, groups, axis), [found, panels, groups, axis]);
  if (!ids.length) return html`<h1>${t("compare")}</h1><p class="empty">${t("compare_none")} <a href=${link([])}>${t("runs")}</a></p>`;
  if (!found) return error ? html`<h1>${t("compare")}</h1><${Failure} error=${error} />` : html`<${Loading} />`;
  const differing = Object.entries(found.config);
  const several = found.groups.some((members) => members.length > 1);
  const shown = panels.filter(({ title, id, also }) => matches(view.find, [title, id, ...also]));
  const still = /** @type {[string, number][]} */ (Object.entries(found.constant)).filter(([name]) => matches(view.find, [name]));
  const large = view.chart !== null && panels.find(({ id }) => id === view.chart);
  const draw = (panel, height, own) => html`<${Metric} key=${panel.id} found=${found} panel=${panel} groups=${groups} steps=${steps} axis=${axis} view=${view} change=${change} ids=${ids} height=${height} large=${own} />`;
  const longest = Math.max(1, ...Object.values(found.curves).flat().map((curve) => (curve ? curve.per : 1)));
  return html`<div class="bar"><h1>${t("compare_n", { n: found.runs.length })}</h1>
      ${several && html`<label><input type="checkbox" checked=${grouped === "yes"} onChange=${(event) => setGrouped(event.target.checked ? "yes" : "no")} /> ${t("over_seeds")}</label>`}</div>
    <${Failure} error=${error} />
    ${found.left_out > 0 && html`<p class="warning" role="status"><span aria-hidden="true">! </span>${t("compare_cut", { n: found.runs.length, left: found.left_out })}</p>`}
    <${Judged} found=${found} groups=${groups} />
    ${grouped === "yes" && found.apart.length > 0 && html`<${Differences} pairs=${found.apart} />`}
    ${grouped === "yes" && found.unfinished.length > 0 && html`<p class="faint">${t("left_out", { runs: found.unfinished.map((i) => visible(found.runs[i].name)).join(", ") })}</p>`}
    ${grouped === "yes" && found.apart_lacks && several && html`<p class="faint">${t("apart_lacks")}</p>`}
    <div class="beside"><section>
    <h2>${t("curves")}</h2>
    <${Tools} view=${view} change=${change} clocks=${clocks}><label><input type="checkbox" checked=${view.all} onChange=${(event) => change({ all: event.target.checked })} /> ${t("all_metrics")}</label></${Tools}>
    ${longest > 1 && html`<p class="faint">${t("stretches_most", { per: longest })}</p>`}
    <div class="charts">${shown.map((panel) => draw(panel, 190, true))}</div>
    <${Flat} metrics=${still} open=${Boolean(view.find)} />
    ${!shown.length && !still.length && html`<p class="empty">${t("nothing_found")}</p>`}
    </section><aside>
    <h2>${t("config_differs")}</h2>
    ${differing.length ? html`<${Keys} groups=${groups} rows=${differing} title=${t("config_differs")} />` : html`<p>${t("nothing_differs")}</p>`}
    ${Object.keys(found.partial).length > 0 && html`<details><summary>${t("config_partial", { n: Object.keys(found.partial).length })}</summary>
      <${Keys} groups=${groups} rows=${Object.entries(found.partial)} title=${t("config_partial", { n: "" })} /></details>`}
    </aside></div>
    ${large && html`<${Large} title=${large.title} close=${() => change({ chart: null })}>${(height) => html`<${Tools} view=${view} change=${change} clocks=${clocks} find=${false} />${draw(large, height, false)}`}</${Large}>`}
    <${Answers} runs=${found.runs} ids=${ids} />
    ${found.runs.length > 1 && html`<${Difference} runs=${found.runs} />`}`;
}
