// Every run below the folder: which needs me, how far, how good.
import { html, get, useState, useEffect, useMemo, useRef, useLive, useKept, useKeys, number, duration, Ago, link, Status, Spark, Failure, Loading, visible } from "./lib.js";
import { t } from "./i18n.js";
import { findingName } from "./findings.js";

/** [{folder, launch, runs}, error], live: what changes is asked for alone. */
function useRuns() {
  const [found, setFound] = useState(null);
  const [error, setError] = useState(null);
  /** Of each run that is being asked for: whether it has changed since. */
  const busy = useRef(new Map());
  const all = async () => {
    try {
      setFound(await get("/api/runs"));
      setError(null);
    } catch (failure) {
      setError(failure);
    }
  };
  const one = async (id) => {
    if (busy.current.has(id)) return busy.current.set(id, true);
    do {
      busy.current.set(id, false);
      try {
        const card = await get(`/api/runs/${id}/card`);
        setFound((old) => old && { ...old, runs: old.runs.map((run) => (run.id === id ? card : run)) });
      } catch {
        all();
      }
    } while (busy.current.get(id));
    busy.current.delete(id);
  };
  useEffect(() => {
    all();
  }, []);
  const known = useRef(null);
  known.current = found;
  useLive((name, ids) => {
    if (name === "ready" && !known.current) return;
    const ours = known.current ? new Set(known.current.runs.map((run) => run.id)) : new Set();
    if (name === "gone" || name === "ready" || (name === "changed" && ids.some((id) => !ours.has(id)))) all();
    else if (name === "changed") ids.forEach(one);
  });
  return [found, error];
}

const FIELDS = ["name", "algorithm", "status", "model", "learning_rate", "seed"];

function matches(run, words) {
  const text = [...FIELDS.map((name) => run[name]), ...run.findings.map((found) => `${found.id} ${findingName(found.id)}`)].join(" ").toLowerCase();
  return words.every((word) => text.includes(word));
}

const ORDERS = {
  updated: (a, b) => b.updated - a.updated,
  name: (a, b) => a.name.localeCompare(b.name),
  value: (a, b) => (b.value ?? -Infinity) - (a.value ?? -Infinity),
  needs: (a, b) => need(b) - need(a) || b.updated - a.updated,
};

/** How much a run needs somebody: failed or with an error first, then what is running, then what is done. */
function need(run) {
  const errors = run.findings.filter((found) => found.severity === "error").length;
  return (run.status === "failed" ? 8 : 0) + (errors ? 4 : 0) + (run.status === "running" ? 2 : 0) + (run.findings.length ? 1 : 0);
}

export function heldOut(run) {
  if ("all" in run.held_out) return run.held_out.all; // of several data sources, by their prompts
  const values = Object.values(run.held_out).filter((value) => value !== null);
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

function Row({ run, chosen, choose, showSeed }) {
  const errors = run.findings.filter((found) => found.severity === "error").length;
  const held = heldOut(run);
  return html`<tr class=${chosen ? "chosen" : ""}>
    <td class="pick"><input type="checkbox" checked=${chosen} onChange=${choose} aria-label=${t("choose", { name: run.name })} /></td>
    <td><${Status} status=${run.status} /></td>
    <th scope="row"><a href=${link(["run", run.id])}>${visible(run.name)}</a>${run.error && html`<small class="error why" title=${run.error}>${visible(run.error.slice(0, 160))}</small>`}</th>
    <td class="wide">${visible(run.algorithm)}</td>
    <td class="progress">${run.progress !== null && html`<progress value=${run.progress} aria-label=${t("progress")}>${number(run.progress)}</progress> `}
      <span class="steps">${run.step}${run.steps ? ` / ${run.steps}` : ""}</span>
      ${run.eta_s !== null && html`<small class="nowrap"> ${t("left", { time: duration(run.eta_s) })}</small>`}</td>
    <td class="nowrap"><${Spark} points=${run.spark} /> <span title=${run.headline || ""}>${number(run.value)}</span></td>
    <td class="nowrap">${held !== null ? html`${number(held)}` : number(run.accuracy)}${held === null && run.accuracy !== null ? html` <small>${t("of_training")}</small>` : ""}</td>
    <td class="nowrap">${run.findings.length
      ? html`<a class=${errors ? "error" : "warning"} href=${link(["run", run.id])} title=${run.findings.map((found) => findingName(found.id)).join(", ")}>
          <span aria-hidden="true">${errors ? "✕" : "!"}</span> ${findingName(run.findings[0].id)}${run.findings.length > 1 ? ` +${run.findings.length - 1}` : ""}</a>`
      : html`<span class="faint">${t("none")}</span>`}</td>
    <td class="wide nowrap">${number(run.learning_rate)}</td>
    <td class="wide">${showSeed ? number(run.seed) : ""}</td>
    <td class="wide nowrap"><${Ago} time=${run.updated} /></td>
  </tr>`;
}

function mean(values) {
  const given = values.filter((value) => value !== null && value !== undefined);
  return given.length ? given.reduce((sum, value) => sum + value, 0) / given.length : null;
}

export function Runs() {
  const [found, error] = useRuns();
  const [text, setText] = useState("");
  const [order, setOrder] = useKept("order", "needs");
  const [grouped, setGrouped] = useKept("grouped", "no");
  const [trials, setTrials] = useKept("trials", "no");
  const [chosen, setChosen] = useState([]);
  const search = useRef(null);
  useEffect(() => {
    document.title = "AtomRL";
  }, []);
  useKeys({ "/": () => search.current && search.current.focus() });
  const groups = useMemo(() => {
    if (!found) return [];
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    const ofStudy = (run) => found.studies.some((study) => run.name.startsWith(`${study.name}/runs/`));
    const runs = found.runs.filter((run) => matches(run, words) && (trials === "yes" || !ofStudy(run))).sort(ORDERS[order] || ORDERS.needs);
    if (grouped !== "yes") return runs.length ? [[null, runs]] : [];
    const byGroup = new Map();
    for (const run of runs) byGroup.set(run.group, [...(byGroup.get(run.group) || []), run]);
    return [...byGroup.entries()];
  }, [found, text, order, grouped, trials]);
  if (!found) return error ? html`<${Failure} error=${error} />` : html`<${Loading} />`;
  const choose = (id) => setChosen(chosen.includes(id) ? chosen.filter((other) => other !== id) : [...chosen, id]);
  const shown = groups.reduce((count, [, runs]) => count + runs.length, 0);
  const running = found.runs.filter((run) => run.status === "running").length;
  const columns = ["status", "name", "algorithm", "progress", "value", "accuracy", "findings", "lr", "seed", "updated"];
  const wide = ["algorithm", "lr", "seed", "updated"];
  return html`
    <h1>${t("runs")} <small>${visible(found.folder)}</small></h1>
    <div class="bar">
      <label class="grow"><span class="hidden">${t("search")}</span>
        <input ref=${search} type="search" placeholder=${t("search_runs")} value=${text} onInput=${(event) => setText(event.target.value)} /></label>
      <label>${t("sort")} <select value=${order} onChange=${(event) => setOrder(event.target.value)}>
        ${Object.keys(ORDERS).map((name) => html`<option value=${name}>${t(`order_${name}`)}</option>`)}</select></label>
      <label><input type="checkbox" checked=${grouped === "yes"} onChange=${(event) => setGrouped(event.target.checked ? "yes" : "no")} /> ${t("group_seeds")}</label>
      ${chosen.length > 1
        ? html`<a class="button" href=${link(["compare", chosen.join(",")])}>${t("compare_n", { n: chosen.length })}</a>`
        : html`<span class="faint">${t("compare_hint")}</span>`}
      ${found.launch && html`<a class="button main" href="#/new">${t("new_run")}</a>`}
    </div>
    <p class="faint"><span role="status">${t("count", { shown, all: found.runs.length, running })}</span>
      ${found.studies.length > 0 && html` · ${t("studies")}: ${found.studies.map((study, i) => html`${i ? ", " : ""}<a href=${link(["study", study.id])}>${visible(study.name)}</a>`)}
        <label><input type="checkbox" checked=${trials === "yes"} onChange=${(event) => setTrials(event.target.checked ? "yes" : "no")} /> ${t("show_trials")}</label>`}</p>
    ${error && html`<${Failure} error=${error} />`}
    ${shown ? html`<div class="scroll" tabindex="0" role="region" aria-label=${t("runs")}><table class="runs">
      <thead><tr><th scope="col" class="pick"><span class="hidden">${t("chosen")}</span></th>
        ${columns.map((name) => html`<th scope="col" class=${wide.includes(name) ? "wide" : ""}>${t(name)}</th>`)}</tr></thead>
      ${groups.map(([group, runs]) => html`<tbody key=${group}>
        ${group && html`<tr class="group"><th colspan="11" scope="rowgroup">
          ${t("group_of", { n: runs.length, name: runs[0].algorithm, value: number(mean(runs.map((run) => run.value))), held: number(mean(runs.map(heldOut))) })}
          ${runs.length > 1 && html` <a href=${link(["compare", runs.map((run) => run.id).join(",")])}>${t("compare")}</a>`}</th></tr>`}
        ${runs.map((run) => html`<${Row} key=${run.id} run=${run} showSeed=${true} chosen=${chosen.includes(run.id)} choose=${() => choose(run.id)} />`)}
      </tbody>`)}
    </table></div>` : html`<p class="empty">${found.runs.length ? t("nothing_found") : t("no_runs", { folder: found.folder })}</p>`}`;
}
