// A new run: the config as a form and as YAML, checked while typing; its equation; whether it fits.
import { html, get, post, link, useState, useEffect, useMemo, useRef, useKeys, Failure, Loading, plainText, visible } from "./lib.js";
import { t, inChinese } from "./i18n.js";
import { wrong, written, valueAt, placeOf } from "./fields.js";

/** Common keys, which are always shown. */
const COMMON = new Set(["run_name", "seed", "model.path", "model.dtype", "data.train", "data.train_size", "data.eval", "data.eval_size", "rollout.prompts_per_step", "rollout.completions_per_prompt", "rollout.max_completion_tokens", "rollout.temperature", "reward.functions", "algorithm.name", "algorithm.kl.coefficient", "train.steps", "train.learning_rate", "train.schedule", "train.rows_per_update", "eval.every_steps", "checkpoint.every_steps"]);
const SECTIONS = ["run", "model", "data", "rollout", "reward", "algorithm", "train", "eval", "checkpoint", "tracking", "sft", "pretrain", "preference", "critic", "teacher", "environment", "cluster", "backend", "asynchronous", "pool"];
const TYPED_MS = 250;
const CHECKED_MS = 400;

const sectionOf = (key) => (key === "tools" ? "environment" : key.includes(".") ? key.split(".")[0] : "run");

let known = null;
/** Return the descriptions of all config keys; fetched once. */
async function keysOf() {
  known = known || (await Promise.all([get("/static/keys.json"), get("/static/keys_zh.json")]));
  const [keys, chinese] = known;
  if (!inChinese()) return keys;
  const types = (item) => Object.fromEntries(Object.entries(item.types).map(([name, [words, line]]) => [name, [chinese[`${item.key}=${name}`] || words, line]]));
  return keys.map((item) => ({ ...item, about: chinese[item.key] || item.about, types: item.types && types(item) }));
}

/** State of a config that form and YAML edit: [draft, problems, checked, change, write, error]. */
function useDraft(query) {
  const from = query.get("from");
  const [draft, setDraft] = useState(null);
  const [checked, setChecked] = useState(null);
  const values = useRef(null);
  const [error, setError] = useState(null);
  const newest = useRef("");
  const queue = useRef(Promise.resolve());
  const timer = useRef(0);
  const take = (found) => {
    newest.current = found.yaml;
    setDraft(found);
    setError(null);
  };
  useEffect(() => {
    setDraft(null);
    setChecked(null);
    get(`/api/draft?${query}`).then(take, setError);
  }, [String(query)]);
  const text = draft && draft.yaml;
  useEffect(() => {
    if (text === null) return undefined;
    const told = (found) => {
      if (newest.current !== text) return;
      if (found.own) change({}, found.own); // converted from the six-section layout, which the form does not support
      values.current = found.values || values.current; // while the YAML is invalid, the last valid values
      setChecked({ ...found, yaml: text });
    };
    const waiting = setTimeout(() => post("/api/check", { yaml: text, from }).then(told, setError), CHECKED_MS);
    return () => clearTimeout(waiting);
  }, [text]);
  /** Set a key; null removes it. Changes are applied one after the other. */
  const change = (values, own = null) => {
    queue.current = queue.current.then(() => post("/api/draft", { yaml: own ?? newest.current, set: values }).then(take, setError));
  };
  const write = (own) => {
    newest.current = own;
    setDraft((old) => ({ ...old, yaml: own }));
    clearTimeout(timer.current);
    timer.current = setTimeout(() => post("/api/draft", { yaml: own }).then((found) => newest.current === own && take(found), setError), TYPED_MS);
  };
  return { draft, checked: checked && checked.yaml === text ? checked : null, values: values.current, change, write, error };
}

function Field({ item, draft, values, problem, change, report, name }) {
  const { key, text: given, own } = placeOf(item, draft.given);
  const [typed, setTyped] = useState(null);
  const timer = useRef(0);
  useEffect(() => setTyped(null), [given]);
  useEffect(() => () => report(item.key, null), []);
  const shown = typed === null ? given : typed;
  const said = typed === null ? null : wrong(item, typed);
  const usual = written(given === "" && values && valueAt(values, item.key) !== undefined ? valueAt(values, item.key) : item.default);
  const set = (value, wait) => {
    const fault = wrong(item, value);
    setTyped(value);
    report(item.key, fault);
    clearTimeout(timer.current);
    if (!fault) timer.current = setTimeout(() => change({ [key]: value.trim() === "" ? null : value }), wait);
  };
  const id = `form-${item.key}`;
  const message = said || problem;
  const more = { id, "aria-describedby": `${id}-about`, "aria-invalid": message ? "true" : undefined };
  const choices = own ? null : item.kind === "boolean" ? ["true", "false"] : item.choices;
  const type = item.types && item.types[shown || usual];
  return html`<div class=${`field ${given !== "" ? "given" : ""} ${message ? "wrong" : ""}`}>
    <div class="label"><label for=${id}><code>${name}</code></label>${item.required || item.key === "model.path" ? html`<small class="faint">${t("required")}</small>` : given !== "" ? html`<button class="quiet small" title=${t("back_to", { value: usual || "–" })} aria-label=${t("reset_key", { key: item.key })} onClick=${() => set("", 0)}><span aria-hidden="true">↺ </span>${usual ? t("default_is", { value: usual }) : t("leave_out")}</button>` : null}</div>
    ${choices
      ? html`<select ...${more} value=${shown} onChange=${(event) => set(event.target.value, 0)}><option value="">${usual ? t("default_is", { value: usual }) : "–"}</option>${shown !== "" && !choices.includes(shown) && html`<option value=${shown}>${visible(shown)}</option>`}${choices.map((one) => html`<option value=${one}>${one}</option>`)}</select>`
      : html`<input ...${more} type="text" inputmode=${item.kind === "integer" ? "numeric" : item.kind === "number" ? "decimal" : undefined} spellcheck="false" autocomplete="off" value=${shown} placeholder=${usual || (item.required ? "" : "null")} onInput=${(event) => set(event.target.value, TYPED_MS)} />`}
    <small class="about" id=${`${id}-about`}>${message && html`<span class="error block"><span aria-hidden="true">✕ </span>${visible(message)}</span>`}${type ? html`${visible(type[0])} <code>${visible(type[1])}</code>` : visible(item.about || "")}</small></div>`;
}

/** An unknown key, shown in its section. */
function Stray({ problem, draft, change }) {
  const better = (problem.message.match(/did you mean '([\w.]+)'/) || [])[1];
  const value = written(valueAt(draft.given, problem.key));
  return html`<div class="field wrong stray"><div class="label"><code>${visible(problem.key)}</code></div>
    <small class="about"><span class="error"><span aria-hidden="true">✕ </span>${visible(problem.message)}</span></small>
    <p class="bar">${better && html`<button onClick=${() => change({ [problem.key]: null, [better]: value })}>${t("rename_to", { key: better })}</button>`}<button onClick=${() => change({ [problem.key]: null })}>${t("remove")}</button></p></div>`;
}

/** The keys of a section: common ones, and those that are set or invalid; all on demand. */
function Section({ name, items, about, draft, values, problems, change, report, searching }) {
  const [all, setAll] = useState(false);
  const types = (axis) => valueAt(values || {}, `algorithm.${axis}.type`) || valueAt(draft.given, `algorithm.${axis}`);
  const problemOf = (key) => problems.filter((one) => one.key === key).map((one) => one.message).join(" ");
  const isGiven = (item) => placeOf(item, draft.given).text !== "";
  const has = items.filter((item) => {
    const axis = item.key.startsWith("algorithm.") && item.key.split(".")[1];
    return isGiven(item) || searching || !item.of || (values && valueAt(values, item.key) !== undefined && item.of.includes(types(axis) || item.of[0]));
  });
  const first = has.filter((item) => COMMON.has(item.key) || isGiven(item) || problemOf(item.key));
  const shown = searching || all ? has : first;
  const strays = problems.filter((one) => one.key && sectionOf(one.key) === name && one.stray);
  const open = searching || shown.length > 0 || strays.length > 0;
  const rest = has.length - shown.length;
  const counted = t(rest === 1 ? "show_key" : "show_keys", { n: rest });
  const more = !searching && (rest > 0 || all) && html`<button class="quiet expand" aria-expanded=${all} aria-label=${`${name}: ${all ? t("fewer_keys") : counted}`} onClick=${() => setAll(!all)}>${all ? t("fewer_keys") : open ? t("more_keys", { n: rest }) : counted}</button>`;
  return html`<section class="keys" aria-label=${name}>
    <div class="head"><h2>${name === "run" ? t("run") : html`<code>${name}</code>`} <small>${visible((about || "").split(/\. |；|。/)[0])}</small></h2>${!open && more}</div>
    ${problemOf(name) && html`<p class="error"><span aria-hidden="true">✕ </span>${visible(problemOf(name))}</p>`}
    ${open && html`<div class="fields">${strays.map((problem) => html`<${Stray} key=${problem.key} problem=${problem} draft=${draft} change=${change} />`)}
      ${shown.map((item) => html`<${Field} key=${item.key} item=${item} name=${item.key.startsWith(`${name}.`) ? item.key.slice(name.length + 1) : item.key} draft=${draft} values=${values} problem=${problemOf(item.key)} change=${change} report=${report} />`)}</div>`}
    ${open && more}</section>`;
}

function StartFrom({ query, edited }) {
  const [found, setFound] = useState(null);
  useEffect(() => {
    Promise.all([get("/api/starts"), get("/api/runs")]).then(([starts, runs]) => setFound({ configs: starts.configs, runs: runs.runs }), () => setFound({ configs: [], runs: [] }));
  }, []);
  const value = query.get("from") ? `from=${query.get("from")}` : query.get("config") ? `config=${query.get("config")}` : "";
  const chosen = (event) => {
    if (edited && !confirm(t("lose_changes"))) {
      event.target.value = value;
      return;
    }
    location.hash = link(["new"], new URLSearchParams(event.target.value)).slice(1);
  };
  return html`<label class="start">${t("start_from")} <select value=${value} onChange=${chosen}>
    <option value="">${t("template")}</option>
    ${found && html`<optgroup label=${t("configs")}>${found.configs.map((one) => html`<option value=${`config=${one.id}`} title=${one.about}>${visible(one.name)}</option>`)}</optgroup>
      <optgroup label=${t("runs")}>${found.runs.map((one) => html`<option value=${`from=${one.id}`}>${visible(one.name)}</option>`)}</optgroup>`}</select></label>`;
}

/** The YAML editor, with invalid lines marked. */
function Editor({ draft, problems, write }) {
  const lines = draft.yaml.split("\n");
  const marked = new Map(problems.filter((one) => one.line !== undefined).map((one) => [one.line, one.message]));
  return html`<div class="editor"><pre class="gutter" aria-hidden="true">${lines.map((_, i) => html`<span class=${marked.has(i) ? "mark-wrong" : ""} title=${marked.get(i)}>${i + 1}</span>`)}</pre>
    <textarea id="config" rows=${lines.length + 1} wrap="off" spellcheck="false" aria-label="YAML" value=${draft.yaml} aria-describedby="check" onInput=${(event) => write(event.target.value)}></textarea></div>`;
}

function Problems({ problems, find }) {
  return html`<ul class="problems">${problems.map((one) => html`<li><span aria-hidden="true">✕ </span>${one.key && html`<button class="quiet small" onClick=${() => find(one)}><code>${visible(one.key)}</code></button> `}${visible(one.message)}</li>`)}</ul>`;
}

/** A row of the data: its prompt, and its pictures made small. */
function DataRow({ row }) {
  const about = (image) => `${plainText(image.source)}, ${image.width} × ${image.height}`;
  return html`<li>${row.images.length > 0 && html`<p class="pictures">${row.images.map((image) => html`<img src=${`data:image/png;base64,${image.thumbnail}`} alt=${about(image)} title=${about(image)} />`)}</p>`}
    <pre class="text" tabindex="0">${visible(row.prompt)}</pre></li>`;
}

/** Review of the config before launch, with the plan. It can only be launched if it fits. */
function Review({ draft, checked, from, close, found, setFound }) {
  const box = useRef(null);
  const [said, setSaid] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => {
    box.current.showModal();
    if (!found) post("/api/plan", { yaml: draft.yaml, from }).then(setFound, setError);
  }, []);
  const start = async () => {
    setSaid(t("starting"));
    setError(null);
    try {
      const done = await post("/api/launches", { yaml: draft.yaml, from });
      setSaid(t("started_as", { name: done.name, process: done.process }));
      for (let tries = 0; tries < 120 && box.current; tries += 1) {
        const run = (await get("/api/runs")).runs.find((one) => one.path === done.name || one.name === done.name);
        if (run) {
          location.hash = link(["run", run.id]).slice(1);
          return;
        }
        await new Promise((ready) => setTimeout(ready, 1000));
      }
    } catch (failure) {
      setSaid(null);
      setError(failure);
    }
  };
  const good = found && (found.fits || found.late);
  return html`<dialog ref=${box} class="review" aria-labelledby="review" onClose=${close}>
    <h2 id="review">${t("review_of", { name: draft.given.run_name })}</h2>
    <dl class="facts"><div><dt>${t("what_it_does")}</dt><dd>${t("does", { kind: checked.kind, steps: checked.steps, updates: checked.updates_per_step })}</dd></div>
      <div><dt>${t("folder")}</dt><dd><code>${visible(checked.run_dir)}</code></dd></div>
      <div><dt>${t("command")}</dt><dd><code>${visible(checked.command)}</code></dd></div>
      <div><dt>${t("memory")}</dt><dd role="status">${error && !found ? null : !found ? html`<span class="loading-inline">${t("planning")}</span>` : html`<span class=${found.fits ? "status finished" : found.late ? "warning" : "status failed"}><span aria-hidden="true">${found.fits ? "✓" : found.late ? "!" : "✕"}</span> ${t(found.fits ? "plan_fits" : found.late ? "plan_late" : found.fits === false ? "plan_does_not_fit" : "plan_failed")}</span>`}</dd></div></dl>
    ${found && !good && found.problems.length > 0 && html`<${Problems} problems=${found.problems} find=${() => box.current.close()} />`}
    ${found && html`<details open=${!good}><summary>${t("plan")}</summary><pre class="page" tabindex="0">${visible(found.text)}</pre></details>`}
    ${found && found.rows.length > 0 && html`<h3>${t("first_rows")}</h3><ol class="history">${found.rows.map((row) => html`<${DataRow} row=${row} />`)}</ol>`}
    <h3>config.yaml</h3><pre class="page" tabindex="0" aria-label="config.yaml">${visible(draft.yaml)}</pre>
    <${Failure} error=${error} />
    <p class="faint">${t("run_goes_on")}</p>
    <p class="bar"><button class="main" disabled=${!good || said !== null} onClick=${start}>${t("launch")}</button><button onClick=${() => box.current.close()}>${t("back")}</button> <span role="status">${said}</span></p></dialog>`;
}

export function NewRun({ query }) {
  const [keys, setKeys] = useState(null);
  const [search, setSearch] = useState("");
  const [faults, setFaults] = useState({});
  const [review, setReview] = useState(false);
  const [plan, setPlan] = useState(null);
  const { draft, checked, values, change, write, error } = useDraft(query);
  const first = useRef(null);
  const field = useRef(null);
  useKeys({ "/": () => field.current && field.current.focus() });
  useEffect(() => {
    document.title = `${t("new_run")} · AtomRL`;
    keysOf().then(setKeys);
  }, []);
  useEffect(() => {
    setPlan(null);
    if (draft && first.current === null) first.current = draft.yaml;
  }, [draft && draft.yaml]);
  useEffect(() => {
    first.current = null;
  }, [String(query)]);
  const names = useMemo(() => new Set((keys || []).map((item) => item.key)), [keys]);
  if (error && !draft) return html`<h1>${t("new_run")}</h1><${Failure} error=${error} />`;
  if (!keys || !draft) return html`<h1>${t("new_run")}</h1><${Loading} />`;
  const report = (key, fault) => setFaults((old) => {
    if ((old[key] || null) === fault) return old;
    const rest = { ...old };
    delete rest[key];
    return fault ? { ...rest, [key]: fault } : rest;
  });
  const lineOf = (key) => {
    for (let parts = (key || "").split("."); parts.length; parts = parts.slice(0, -1)) if (parts.join(".") in draft.lines) return draft.lines[parts.join(".")];
    return undefined;
  };
  const unread = draft.errors ? draft.errors.map((message) => ({ key: null, message, line: draft.line ?? undefined })) : [];
  const told = unread.length ? unread : [...((checked && checked.problems) || []), ...((plan && !plan.fits && plan.problems) || [])];
  const typed = Object.entries(faults).map(([key, message]) => ({ key, message }));
  const problems = [...typed, ...told.map((one) => ({ ...one, line: one.line ?? lineOf(one.key), stray: Boolean(one.key) && !names.has(one.key) }))];
  const good = checked && !checked.failed && !problems.length;
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const found = (item) => words.every((word) => `${item.key} ${item.about || ""} ${(item.choices || []).join(" ")}`.toLowerCase().includes(word));
  const find = (problem) => {
    setSearch("");
    const at = document.getElementById(`form-${problem.key}`) || (problem.line === undefined ? null : document.getElementById("config"));
    if (!at) return;
    at.scrollIntoView({ block: "center" });
    at.focus({ preventScroll: true });
  };
  const status = !checked ? (unread.length || typed.length ? null : html`<span class="loading-inline" role="status">${t("checking")}</span>`) : checked.failed ? html`<span class="error">${visible(checked.failed)}</span>` : null;
  const changed = Object.entries((good && checked.changed) || {});
  const about = (name) => (keys.find((item) => item.key === name && item.kind === "section") || {}).about;
  const sections = SECTIONS.map((name) => [name, keys.filter((item) => item.kind !== "section" && sectionOf(item.key) === name && (!words.length || found(item)))]);
  return html`<div class="new-run"><h1>${t("new_run")}</h1>
    <div class="bar"><${StartFrom} query=${query} edited=${first.current !== null && draft.yaml !== first.current} />
      <label class="grow"><span class="hidden">${t("search")}</span><input ref=${field} type="search" placeholder=${t("search_keys", { n: names.size })} value=${search} onInput=${(event) => setSearch(event.target.value)} /></label></div>
    <div class="write">
      <div class="form">${sections.map(([name, items]) => (items.length || problems.some((one) => one.stray && sectionOf(one.key) === name)) && html`<${Section} key=${name} name=${name} items=${items} about=${about(name)} draft=${draft} values=${values} problems=${problems} change=${change} report=${report} searching=${words.length > 0} />`)}
        ${words.length > 0 && sections.every(([, items]) => !items.length) && html`<p class="empty">${t("nothing_found")}</p>`}</div>
      <aside class="result">
        <div class="launch" id="check" aria-live="polite">
          ${good ? html`<p class="status finished"><span aria-hidden="true">✓</span> ${t("valid", { kind: checked.kind, steps: checked.steps, updates: checked.updates_per_step })}</p>` : problems.length ? html`<p class="status failed">✕ ${t("n_problems", { n: problems.length })}</p>` : html`<p>${status}</p>`}
          <button class="main" disabled=${!good} onClick=${() => setReview(true)}>${t("review")}</button></div>
        ${problems.length > 0 && html`<${Problems} problems=${problems} find=${find} />`}<${Failure} error=${error} />
        <h2>config.yaml <small>${t("yaml_hint")}</small></h2>
        <${Editor} draft=${draft} problems=${problems} write=${write} />
        ${good && html`<details><summary>${t("changed")} (${changed.length})</summary><table><tbody>${changed.map(([key, [usual, own]]) => html`<tr><th scope="row"><code>${visible(key)}</code></th><td><code>${visible(JSON.stringify(own))}</code></td><td class="faint"><code>${visible(JSON.stringify(usual) ?? "–")}</code></td></tr>`)}</tbody></table></details>
        <details><summary>${t("equation")}</summary><pre class="page" tabindex="0">${visible(checked.equation)}</pre></details>`}
      </aside></div>
    ${review && checked && html`<${Review} draft=${draft} checked=${checked} from=${query.get("from")} found=${plan} setFound=${setPlan} close=${() => setReview(false)} />`}</div>`;
}
