// A new run: a config, checked while it is written, what it computes, and the command that does the same.
import { html, get, post, useState, useEffect, useRef, Failure, visible } from "./lib.js";
import { t } from "./i18n.js";

const START = `run_name: my-run
output_dir: runs
model:
  path: runs/quickstart-warm-start/model
data:
  train: chain
  eval: chain
rollout:
  prompts_per_step: 64
  completions_per_prompt: 8
  max_completion_tokens: 48
reward:
  functions: [strict_math]
algorithm:
  name: grpo
train:
  steps: 60
  learning_rate: 1.0e-3
`;

/** The keys that most runs set. */
const FORM = ["run_name", "model.path", "data.train", "data.eval", "algorithm.name", "reward.functions", "rollout.prompts_per_step", "rollout.completions_per_prompt", "rollout.max_completion_tokens", "rollout.temperature", "train.steps", "train.learning_rate", "model.lora.rank", "eval.every_steps", "checkpoint.every_steps", "seed"];

/** A value as it is written in the form: YAML, on one line. */
const written = (value) => (value === null || value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value));

function Field({ name, checked, change }) {
  const given = checked && checked.given && name in checked.given ? written(checked.given[name]) : "";
  const usual = checked && checked.values ? written(checked.values[name]) : "";
  const id = `form-${name}`;
  const wrong = ((checked && checked.errors) || []).filter((line) => line.includes(name));
  const about = wrong.length ? `${id}-wrong` : undefined;
  const set = (event) => event.target.value !== given && change(name, event.target.value);
  return html`<div class="field"><label for=${id}><code>${name}</code></label>
    ${name === "algorithm.name" && checked && checked.algorithms ? html`<select id=${id} value=${given} aria-describedby=${about} onChange=${set}><option value="">${usual}</option>${checked.algorithms.map((one) => html`<option value=${one}>${one}</option>`)}</select>`
      : html`<input id=${id} type="text" spellcheck="false" value=${given} placeholder=${usual} aria-describedby=${about} aria-invalid=${wrong.length ? "true" : undefined} onChange=${set} />`}
    ${wrong.length > 0 && html`<small class="error" id=${about}>${visible(wrong.join(" "))}</small>`}</div>`;
}

function Plan({ yaml, from }) {
  const [found, setFound] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => {
    setFound(null);
    setError(null);
  }, [yaml]);
  const ask = async () => {
    setFound("asking");
    try {
      setFound(await post("/api/plan", { yaml, from }));
    } catch (failure) {
      setFound(null);
      setError(failure);
    }
  };
  return html`<h3>${t("plan")}</h3><p><button onClick=${ask} disabled=${found === "asking"}>${t("make_plan")}</button></p>
    <div role="status">${found === "asking" ? html`<p class="loading">${t("planning")}</p>` : found && html`
      <p class=${found.fits === true ? "status finished" : "status failed"}><span aria-hidden="true">${found.fits === true ? "✓" : "✕"}</span> ${t(found.fits === true ? "plan_fits" : found.fits === false ? "plan_does_not_fit" : "plan_failed")}</p>
      <pre class="page" tabindex="0">${visible(found.text)}</pre>`}</div><${Failure} error=${error} />`;
}

export function NewRun({ query }) {
  const [text, setText] = useState(START);
  const [checked, setChecked] = useState(null);
  const [error, setError] = useState(null);
  const [said, setSaid] = useState(null);
  const timer = useRef(0);
  const newest = useRef("");
  useEffect(() => {
    document.title = `${t("new_run")} · AtomRL`;
    const parent = query.get("from");
    if (parent) get(`/api/runs/${parent}/config`).then((found) => setText(found.yaml.replace(/^run_name: (['"]?)(.*)\1$/m, "run_name: $1$2-2$1")), setError);
    else get("/api/runs").then((found) => setText(START.replace("output_dir: runs", `output_dir: ${found.folder}`)), setError);
  }, [query.get("from")]);
  useEffect(() => {
    newest.current = text;
    clearTimeout(timer.current);
    timer.current = setTimeout(async () => {
      try {
        const found = await post("/api/check", { yaml: text, from: query.get("from") });
        if (newest.current === text) setChecked(found);
        setError(null);
      } catch (failure) {
        setError(failure);
      }
    }, 400);
  }, [text]);
  const change = async (key, value) => {
    try {
      const found = await post("/api/check", { yaml: text, set: { [key]: value }, from: query.get("from") });
      if (found.yaml) setText(found.yaml);
      setChecked(found);
      setError(null);
    } catch (failure) {
      setError(failure);
    }
  };
  const launch = async () => {
    setSaid(t("starting"));
    try {
      const done = await post("/api/launches", { yaml: text, from: query.get("from") });
      setSaid(t("started_as", { name: done.name, process: done.process }));
    } catch (failure) {
      setSaid(null);
      setError(failure);
    }
  };
  const good = checked && !checked.failed && !(checked.errors || []).length;
  const changed = Object.entries((good && checked.changed) || {});
  return html`<h1>${t("new_run")}</h1>
    <div class="two">
      <div><details open class="form"><summary>${t("form")}</summary><p class="faint">${t("form_hint")}</p>
        <div class="fields">${FORM.map((name) => html`<${Field} key=${name} name=${name} checked=${checked} change=${change} />`)}</div></details>
        <label for="config"><h2>${t("config")}</h2></label>
        <textarea id="config" rows="28" spellcheck="false" value=${text} aria-describedby="check" onInput=${(event) => setText(event.target.value)}></textarea></div>
      <div id="check" aria-live="polite">
        <h2>${t("check")}</h2><${Failure} error=${error} />
        ${!checked ? html`<p class="loading">${t("asking_schema")}</p>` : good ? html`
          <p class="status finished"><span aria-hidden="true">✓</span> ${t("valid", { kind: checked.kind, steps: checked.steps, updates: checked.updates_per_step })}</p>
          <p><button class="main" onClick=${launch}>${t("launch")}</button> <span role="status">${said}</span></p>
          <h3>${t("command")}</h3><p class="faint">${t("command_hint")}</p><pre class="page" tabindex="0">${visible(checked.command)}</pre>
          <p class="faint">${t("run_goes_on")}</p>
          <${Plan} yaml=${text} from=${query.get("from")} />
          <h3>${t("changed")}</h3><table><tbody>${changed.map(([key, [usual, own]]) => html`<tr><th scope="row"><code>${visible(key)}</code></th><td><code>${visible(JSON.stringify(own))}</code></td><td class="faint"><code>${visible(JSON.stringify(usual) ?? "–")}</code></td></tr>`)}</tbody></table>
          <h3>${t("equation")}</h3><pre class="page" tabindex="0">${visible(checked.equation)}</pre>`
        : html`<div class="failure" role="alert"><pre>${visible(checked.failed || checked.errors.join("\n"))}</pre></div>`}
      </div></div>`;
}
