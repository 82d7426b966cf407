// Runs beside each other: what differs in their configs, and their curves.
import { html, get, useState, useMemo, useEffect, useGet, useKept, number, link, Status, Failure, Loading, visible } from "./lib.js";
import { t } from "./i18n.js";
import { Chart, CHARTS } from "./charts.js";
import { heldOut } from "./runs.js";

/** Mean and range over the runs of a group, at the steps that all of them have. */
function bands(curves, members) {
  const given = members.map((i) => curves[i]).filter(Boolean);
  if (!given.length) return [];
  const at = given.map(([steps, values]) => new Map(steps.map((step, i) => [step, values[i]])));
  const steps = given[0][0].filter((step) => at.every((one) => one.has(step)));
  const over = (reduce) => steps.map((step) => reduce(at.map((one) => one.get(step))));
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  return [[steps, over(mean)], [steps, over((values) => Math.min(...values))], [steps, over((values) => Math.max(...values))]];
}

function seriesOf(found, metric, grouped) {
  const curves = found.curves[metric];
  if (!grouped) {
    return found.runs.map((run, i) => curves[i] && { name: run.id, label: run.name, x: curves[i][0], y: curves[i][1], color: i, dots: curves[i][0].length < 12 }).filter(Boolean);
  }
  const groups = [...new Set(found.runs.map((run) => run.group))];
  return groups.flatMap((group, color) => {
    const members = found.runs.map((run, i) => (run.group === group ? i : -1)).filter((i) => i >= 0);
    const label = found.runs[members[0]].name + (members.length > 1 ? ` ×${members.length}` : "");
    return bands(curves, members).slice(0, members.length > 1 ? 3 : 1).map(([x, y], i) => ({ name: `${group}${i}`, label: `${label}${["", ` ${t("least")}`, ` ${t("most")}`][i]}`, x, y, color, fade: i > 0, dots: x.length < 12 }));
  });
}

function Keys({ runs, rows, title }) {
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${title}><table>
    <thead><tr><th scope="col">${t("key")}</th>${runs.map((run) => html`<th scope="col">${visible(run.name)}</th>`)}</tr></thead>
    <tbody>${rows.map(([key, values]) => html`<tr><th scope="row"><code>${visible(key)}</code></th>${values.map((value) => html`<td><code>${value === null ? "–" : visible(JSON.stringify(value))}</code></td>`)}</tr>`)}</tbody>
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
        return html`<tr><th scope="row"><pre class="text">${visible((asked.prompt || "").slice(-400))}</pre>${truth !== null && truth !== undefined && html`<small>${t("ground_truth")}: <code>${visible(typeof truth === "string" ? truth : JSON.stringify(truth))}</code></small>`}</th>
          ${row.map((one, i) => html`<td>${one ? html`<p><a href=${link(["run", runs[i].id, "rollouts", ...one.at.map(String)])}>${t("reward")} ${number(one.mean)}</a></p><pre class="text">${visible(one.completion.slice(0, 600))}</pre>` : "–"}</td>`)}</tr>`;
      })}</tbody></table></div>` : html`<p class="empty">${differing ? t("all_answers_alike") : t("nothing_found")}</p>`}`;
}

export function Compare({ ids }) {
  const [found, error] = useGet(`/api/compare?runs=${ids.join(",")}`, ids);
  const [grouped, setGrouped] = useKept("compare-grouped", "no");
  useEffect(() => {
    document.title = `${t("compare")} · AtomRL`;
  }, []);
  const charts = useMemo(() => {
    if (!found) return [];
    const metrics = Object.keys(found.curves).filter((name) => found.curves[name].some(Boolean));
    /** @type {[number, string][]} */
    const titled = metrics.map((name) => {
      const known = CHARTS.findIndex(([, test]) => test(name));
      return [known < 0 ? 99 : known, name];
    });
    return titled.sort((a, b) => a[0] - b[0]).map(([place, name]) => [place < 99 ? `${t(`chart_${CHARTS[place][0]}`)}: ${name}` : name, seriesOf(found, name, grouped === "yes")]);
  }, [found, grouped]);
  if (!found) return error ? html`<h1>${t("compare")}</h1><${Failure} error=${error} />` : html`<${Loading} />`;
  const differing = Object.entries(found.config);
  return html`<h1>${t("compare_n", { n: found.runs.length })}</h1><${Failure} error=${error} />
    <div class="scroll" tabindex="0" role="region" aria-label=${t("runs")}><table>
      <thead><tr><th scope="col">${t("name")}</th><th scope="col">${t("status")}</th><th scope="col">${t("step")}</th><th scope="col">${t("value")}</th><th scope="col">${t("held_out_accuracy")}</th><th scope="col">${t("findings")}</th></tr></thead>
      <tbody>${found.runs.map((run, i) => html`<tr><th scope="row"><span class=${`swatch c${i % 8}`} aria-hidden="true"></span> <a href=${link(["run", run.id])}>${visible(run.name)}</a></th>
        <td><${Status} status=${run.status} /></td><td>${run.step}</td><td>${number(run.value)}</td><td>${number(heldOut(run))}</td>
        <td>${run.findings.map((one) => one.id.replaceAll("_", " ")).join(", ") || t("none")}</td></tr>`)}</tbody></table></div>
    <h2>${t("config_differs")}</h2>
    ${differing.length ? html`<${Keys} runs=${found.runs} rows=${differing} title=${t("config_differs")} />` : html`<p>${t("nothing_differs")}</p>`}
    ${Object.keys(found.partial).length > 0 && html`<details><summary>${t("config_partial", { n: Object.keys(found.partial).length })}</summary>
      <${Keys} runs=${found.runs} rows=${Object.entries(found.partial)} title=${t("config_partial", { n: "" })} /></details>`}
    <div class="bar"><h2>${t("curves")}</h2><label><input type="checkbox" checked=${grouped === "yes"} onChange=${(event) => setGrouped(event.target.checked ? "yes" : "no")} /> ${t("over_seeds")}</label></div>
    <div class="charts">${charts.map(([title, series]) => series.length > 0 && html`<${Chart} key=${title + grouped} title=${title} series=${series} sync="compare" height=${190} />`)}</div>
    <${Answers} runs=${found.runs} ids=${ids} />
    ${found.runs.length > 1 && html`<${Difference} runs=${found.runs} />`}`;
}
