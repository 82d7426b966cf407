// Runs beside each other: what differs in their configs, and their curves.
import { html, get, useState, useMemo, useEffect, useGet, useKept, number, link, Status, Failure, Loading, visible } from "./lib.js";
import { t } from "./i18n.js";
import { findingName } from "./findings.js";
import { Chart, CHARTS, sample } from "./charts.js";

/** The runs that the table and the charts show together: those of one config with other seeds, or each by itself. */
function groupsOf(found, grouped) {
  const groups = grouped ? found.groups : found.runs.map((_, i) => [i]);
  return groups.map((members, color) => ({ members, color, name: members.length > 1 ? `${found.group_names[color]} ×${members.length}` : found.runs[members[0]].name }));
}

function seriesOf(found, metric, groups) {
  return groups.map(({ members, color, name }) => {
    const band = members.length > 1 ? found.bands[metric][color] : null;
    const curve = found.curves[metric][members[0]];
    if (band) return { name, label: name, x: band.steps, y: band.mean, low: band.low, high: band.high, color, dots: band.steps.length < 12 };
    return members.length === 1 && curve && { name, label: name, x: curve[0], y: curve[1], color, dots: curve[0].length < 12 };
  }).filter(Boolean);
}

/** The words of a column, which is named by what it is the mean of. */
function columnTitle(title) {
  const said = t(`judged_${title}`);
  return said.startsWith("judged_") ? visible(title) : said;
}

function range(found) {
  return found === null ? "–" : html`${number(found[0])} <small class="nowrap">[${number(found[1])}, ${number(found[2])}]</small>`;
}

/** What the runs are judged by; those that differ in their seeds alone have a line together. */
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

/** Keys of the config beside each other. Runs of a group have one column; where they differ, as in their seeds, it has
 * all of their values. */
function Keys({ groups, rows, title }) {
  const said = (value) => (value === null ? "–" : visible(JSON.stringify(value)));
  const cell = (values, members) => {
    const own = members.map((i) => values[i]);
    return own.every((value) => JSON.stringify(value) === JSON.stringify(own[0])) ? said(own[0]) : own.map((value, i) => [i ? ", " : "", said(value)]);
  };
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${title}><table>
    <thead><tr><th scope="col">${t("key")}</th>${groups.map(({ name }) => html`<th scope="col">${visible(name)}</th>`)}</tr></thead>
    <tbody>${rows.map(([key, values]) => html`<tr><th scope="row"><code>${visible(key)}</code></th>${groups.map(({ members }) => html`<td><code>${cell(values, members)}</code></td>`)}</tr>`)}</tbody>
  </table></div>`;
}

/** Where two of the runs begin to differ, as `atomrl diff` says it. */
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

/** Each run's answers to the same held-out prompts, at its newest evaluation. */
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
      <thead><tr><th scope="col">${t("prompt")}</th>${runs.map((run, i) => html`<th scope="col">${visible(run.name)} ${found.steps[i] !== null && html`<small>${t("step")} ${found.steps[i]}</small>`}</th>`)}</tr></thead>
      <tbody>${found.rows.map((row) => {
        const asked = row.find(Boolean) || {};
        const truth = asked.ground_truth;
        return html`<tr><th scope="row"><pre class="text" tabindex="0" aria-label=${t("prompt")}>${visible((asked.prompt || "").slice(-400))}</pre>${truth !== null && truth !== undefined && html`<small>${t("ground_truth")}: <code>${visible(typeof truth === "string" ? truth : JSON.stringify(truth))}</code></small>`}</th>
          ${row.map((one, i) => html`<td>${one ? html`<p><a href=${link(["run", runs[i].id, "rollouts", ...one.at.map(String)])}>${t("reward")} ${number(one.mean)}</a></p><pre class="text" tabindex="0" aria-label=${t("completion")}>${visible(one.completion.slice(0, 600))}</pre>` : "–"}</td>`)}</tr>`;
      })}</tbody></table></div>` : html`<p class="empty">${differing ? t("all_answers_alike") : t("nothing_found")}</p>`}`;
}

export function Compare({ ids }) {
  const [found, error] = useGet(`/api/compare?runs=${ids.join(",")}`, ids);
  const [grouped, setGrouped] = useKept("compare-grouped", "yes");
  useEffect(() => {
    document.title = `${t("compare")} · AtomRL`;
  }, []);
  const groups = useMemo(() => (found ? groupsOf(found, grouped === "yes") : []), [found, grouped]);
  const charts = useMemo(() => {
    if (!found) return [];
    const metrics = Object.keys(found.curves).filter((name) => found.curves[name].some(Boolean));
    /** @type {[number, string][]} */
    const titled = metrics.map((name) => {
      const known = CHARTS.findIndex(([, test]) => test(name));
      return [known < 0 ? 99 : known, name];
    });
    return titled.sort((a, b) => a[0] - b[0]).map(([place, name]) => [place < 99 ? `${t(`chart_${CHARTS[place][0]}`)}: ${name}` : name, seriesOf(found, name, groups)]);
  }, [found, groups]);
  if (!found) return error ? html`<h1>${t("compare")}</h1><${Failure} error=${error} />` : html`<${Loading} />`;
  const differing = Object.entries(found.config);
  const several = found.groups.some((members) => members.length > 1);
  return html`<div class="bar"><h1>${t("compare_n", { n: found.runs.length })}</h1>
      ${several && html`<label><input type="checkbox" checked=${grouped === "yes"} onChange=${(event) => setGrouped(event.target.checked ? "yes" : "no")} /> ${t("over_seeds")}</label>`}</div>
    <${Failure} error=${error} />
    ${found.left_out > 0 && html`<p class="warning" role="status"><span aria-hidden="true">! </span>${t("compare_cut", { n: found.runs.length, left: found.left_out })}</p>`}
    <${Judged} found=${found} groups=${groups} />
    ${grouped === "yes" && found.apart.length > 0 && html`<ul class="apart">${found.apart.map((line) => html`<li key=${line}>${visible(line)}</li>`)}</ul>`}
    <div class="beside"><section>
    <h2>${t("curves")}</h2>
    <div class="charts">${charts.map(([title, series]) => series.length > 0 && html`<${Chart} key=${title + grouped} title=${title} series=${series} sync="compare" height=${190} />`)}</div>
    </section><aside>
    <h2>${t("config_differs")}</h2>
    ${differing.length ? html`<${Keys} groups=${groups} rows=${differing} title=${t("config_differs")} />` : html`<p>${t("nothing_differs")}</p>`}
    ${Object.keys(found.partial).length > 0 && html`<details><summary>${t("config_partial", { n: Object.keys(found.partial).length })}</summary>
      <${Keys} groups=${groups} rows=${Object.entries(found.partial)} title=${t("config_partial", { n: "" })} /></details>`}
    </aside></div>
    <${Answers} runs=${found.runs} ids=${ids} />
    ${found.runs.length > 1 && html`<${Difference} runs=${found.runs} />`}`;
}
