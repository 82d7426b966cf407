// The list of runs: status, progress, results.
import { html, get, useState, useEffect, useMemo, useRef, useLive, useKept, useKeys, number, duration, Explain, Ago, link, Status, SortBy, SortedBy, Spark, Failure, Loading, visible } from "./lib.js";
import { t } from "./i18n.js";
import { findingName } from "./findings.js";

/** [{folder, launch, runs}, error], live: only changed runs are fetched. */
function useRuns() {
  const [found, setFound] = useState(null);
  const [error, setError] = useState(null);
  /** Run that is being fetched -> true if it has changed meanwhile. */
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

const last = (about) => (about ? about.last[1] : null);

/** Columns: sort key, and the direction of the first click. Losses and rewards are comparable only among runs of one
 * kind.
 * @type {Record<string, [(run: any) => any, "descending" | "ascending"]>} */
const COLUMNS = {
  status: [need, "descending"],
  name: [(run) => run.name, "ascending"],
  model: [(run) => run.model, "ascending"],
  algorithm: [(run) => run.algorithm, "ascending"],
  progress: [(run) => run.step, "descending"],
  duration: [(run) => run.seconds, "descending"],
  loss: [(run) => last(run.loss), "ascending"],
  reward: [(run) => last(run.reward), "descending"],
  on_held_out: [(run) => last(run.held_out[0]), "descending"],
  started: [started, "descending"],
};
const WIDE = ["model", "algorithm", "duration", "started"];

/** Sort key of the status: failed, stalled or with an error first, then running, then finished. */
function need(run) {
  const errors = run.findings.filter((found) => found.severity === "error").length;
  return (run.status === "failed" || run.silent_s !== null ? 8 : 0) + (errors ? 4 : 0) + (run.status === "running" ? 2 : 0) + (run.findings.length ? 1 : 0);
}

/** Start time of a run in seconds since 1970, or null. */
function started(run) {
  const at = run.started ? Date.parse(run.started) / 1000 : NaN;
  return Number.isNaN(at) ? null : at;
}

/** Sort runs by a column; runs without a value come last, equal ones by their last update. */
function sorted(runs, column, direction) {
  const [of] = COLUMNS[column];
  const sign = direction === "descending" ? -1 : 1;
  return [...runs].sort((a, b) => {
    const [x, y] = [of(a), of(b)];
    const lacking = Number(x === null || x === undefined) - Number(y === null || y === undefined);
    const order = lacking || (x === null || x === undefined ? 0 : sign * (typeof x === "string" ? x.localeCompare(y) : x - y));
    return order || b.updated - a.updated;
  });
}

/** Short name of a model: without the `model` folder of a run and the folder of the runs. */
const shortModel = (path) => String(path).replace(/\/+$/, "").replace(/\/model$/, "").split("/").slice(-2).join("/").replace(/^runs\//, "");

/** Time since a stalled run's last update. */
export function Silent({ run }) {
  return run.silent_s === null ? null : html`<span class="silent" title=${t("silent_hint")}>${t("silent")} <${Ago} time=${run.updated} /></span>`;
}

function Row({ run, chosen, choose }) {
  const errors = run.findings.filter((found) => found.severity === "error").length;
  const held = run.held_out[0];
  const settings = [run.learning_rate !== null && `${t("lr")} ${number(run.learning_rate)}`, run.seed !== null && `${t("seed")} ${number(run.seed)}`].filter(Boolean).join(" · ");
  return html`<tr class=${`${chosen ? "chosen" : ""} ${run.status === "failed" ? "broken" : run.silent_s !== null ? "still" : errors ? "ill" : ""}`}>
    <td class="pick"><input type="checkbox" checked=${chosen} onChange=${choose} aria-label=${t("choose", { name: run.name })} /></td>
    <td><${Status} status=${run.status} /> <${Silent} run=${run} /></td>
    <th scope="row"><a href=${link(["run", run.id])}>${visible(run.name)}</a><small class="faint settings">${settings}</small>
      ${run.status === "failed" && html`<small class="error why" title=${run.error || run.why}>${run.error ? visible(run.error.slice(0, 160)) : t("died")}</small>`}
      ${run.findings.length > 0 && html`<a class=${`why ${errors ? "error" : "warning"}`} href=${link(["run", run.id])} title=${run.findings.map((found) => findingName(found.id)).join(", ")}>
        <span aria-hidden="true">${errors ? "✕" : "!"}</span> ${findingName(run.findings[0].id)}${run.findings.length > 1 ? ` +${run.findings.length - 1}` : ""}</a>`}</th>
    <td class="wide short" title=${run.model || ""}>${run.model ? visible(shortModel(run.model)) : html`<span class="faint">${run.kind === "sft" || run.kind === "pretrain" ? t("from_scratch") : "–"}</span>`}</td>
    <td class="wide short">${visible(run.algorithm)}</td>
    <td class="progress"><span class="steps">${run.step}${run.steps ? ` / ${run.steps}` : ""}</span>
      ${run.progress !== null && html`<progress value=${run.progress} aria-label=${t("progress")}>${number(run.progress)}</progress>`}
      ${run.eta_s !== null && run.silent_s === null && html`<small class="faint">${t("left", { time: duration(run.eta_s) })}</small>`}</td>
    <td class="wide nowrap">${run.seconds ? duration(run.seconds) : "–"}</td>
    <${Curve} about=${run.loss} /><${Curve} about=${run.reward} />
    <td class=${`nowrap ${held ? "" : "lacks"}`} title=${held ? held.name : ""}>${held ? html`<strong>${number(held.last[1])}</strong> <small class="faint">${t(`kind_${held.kind}`)}</small>` : "–"}</td>
    <td class="wide nowrap" title=${run.started || ""}>${started(run) === null ? html`<${Ago} time=${run.updated} />` : html`<${Ago} time=${started(run)} />`}</td>
  </tr>`;
}

function Curve({ about }) {
  return html`<td class=${`nowrap curve ${about ? "" : "lacks"}`} title=${about ? about.name : ""}>${about ? html`<${Spark} points=${about.spark} /> ${number(about.last[1])}` : html`<span class="faint">–</span>`}</td>`;
}

function mean(values) {
  const given = values.filter((value) => value !== null && value !== undefined);
  return given.length ? given.reduce((sum, value) => sum + value, 0) / given.length : null;
}

export function Runs() {
  const [found, error] = useRuns();
  const [text, setText] = useState("");
  const [order, setOrder] = useKept("order", "status descending");
  const [grouped, setGrouped] = useKept("grouped", "no");
  const [trials, setTrials] = useKept("trials", "no");
  const [chosen, setChosen] = useState([]);
  const search = useRef(null);
  const [kept, direction] = order.split(" ");
  const column = Object.hasOwn(COLUMNS, kept) ? kept : "status";
  const sortBy = (name) => setOrder(`${name} ${name !== column ? COLUMNS[name][1] : direction === "descending" ? "ascending" : "descending"}`);
  useEffect(() => {
    document.title = "AtomRL";
  }, []);
  useKeys({ "/": () => search.current && search.current.focus() });
  const groups = useMemo(() => {
    if (!found) return [];
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    const ofStudy = (run) => found.studies.some((study) => run.name.startsWith(`${study.name}/runs/`));
    const runs = sorted(found.runs.filter((run) => matches(run, words) && (trials === "yes" || !ofStudy(run))), column, direction);
    if (grouped !== "yes") return runs.length ? [[null, runs]] : [];
    const byGroup = new Map();
    for (const run of runs) byGroup.set(run.group, [...(byGroup.get(run.group) || []), run]);
    return [...byGroup.entries()];
  }, [found, text, column, direction, grouped, trials]);
  if (!found) return error ? html`<${Failure} error=${error} />` : html`<${Loading} />`;
  const choose = (id) => setChosen(chosen.includes(id) ? chosen.filter((other) => other !== id) : [...chosen, id]);
  const ids = groups.flatMap(([, runs]) => runs.map((run) => run.id));
  const shown = ids.length;
  const running = found.runs.filter((run) => run.status === "running").length;
  return html`
    <h1>${t("runs")} <small>${visible(found.folder)}</small></h1>
    <div class="bar runsbar">
      <label class="grow"><span class="hidden">${t("search")}</span>
        <input ref=${search} type="search" placeholder=${t("search_runs")} value=${text} onInput=${(event) => setText(event.target.value)} /></label>
      <label><input type="checkbox" checked=${grouped === "yes"} onChange=${(event) => setGrouped(event.target.checked ? "yes" : "no")} /> ${t("group_seeds")}</label>
      <${SortBy} names=${Object.keys(COLUMNS)} column=${column} sort=${sortBy} />
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
      <thead><tr><th scope="col" class="pick"><input type="checkbox" checked=${ids.every((id) => chosen.includes(id))} onChange=${(event) => setChosen(event.target.checked ? [...new Set([...chosen, ...ids])] : chosen.filter((id) => !ids.includes(id)))} aria-label=${t("choose_all")} title=${t("choose_all")} /></th>
        ${Object.keys(COLUMNS).map((name) => html`<${SortedBy} key=${name} name=${name} title=${t(`col_${name}_hint`)} kind=${WIDE.includes(name) ? "wide" : ""} direction=${name === column ? direction : null} sort=${() => sortBy(name)} />`)}</tr></thead>
      ${groups.map(([group, runs]) => html`<tbody key=${group}>
        ${group && html`<tr class="group"><th colspan="11" scope="rowgroup">
          ${t("group_of", { n: runs.length, name: runs[0].algorithm, value: number(mean(runs.map((run) => last(run.reward || run.loss)))), held: number(mean(runs.map((run) => last(run.held_out[0])))) })}
          ${runs.length > 1 && html` <a href=${link(["compare", runs.map((run) => run.id).join(",")])}>${t("compare")}</a>`}</th></tr>`}
        ${runs.map((run) => html`<${Row} key=${run.id} run=${run} chosen=${chosen.includes(run.id)} choose=${() => choose(run.id)} />`)}
      </tbody>`)}
    </table></div>
    <${Explain} terms=${["status", "progress", "duration", "loss", "reward", "on_held_out"].map((name) => [t(name), t(`col_${name}_hint`)])} />` : html`<p class="empty">${found.runs.length ? t("nothing_found") : html`${t("no_runs", { folder: found.folder })} <a href="#/docs/start/quickstart">${t("how_to_start")}</a>`}</p>`}`;
}
