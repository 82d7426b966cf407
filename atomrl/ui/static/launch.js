// A new run: a config, checked while it is written, what it computes, and the command that does the same.
import { html, get, post, useState, useEffect, useRef, link, Failure, visible } from "./lib.js";
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
    if (parent) get(`/api/runs/${parent}/config`).then((found) => setText(found.yaml.replace(/^run_name: (.*)$/m, "run_name: $1-2")), setError);
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
      <div><label for="config"><h2>${t("config")}</h2></label>
        <textarea id="config" rows="28" spellcheck="false" value=${text} aria-describedby="check" onInput=${(event) => setText(event.target.value)}></textarea></div>
      <div id="check" aria-live="polite">
        <h2>${t("check")}</h2><${Failure} error=${error} />
        ${!checked ? html`<p class="loading">${t("asking_schema")}</p>` : good ? html`
          <p class="status finished"><span aria-hidden="true">✓</span> ${t("valid", { kind: checked.kind, steps: checked.steps, updates: checked.updates_per_step })}</p>
          <p><button class="main" onClick=${launch}>${t("launch")}</button> <span role="status">${said}</span></p>
          <h3>${t("command")}</h3><pre class="page" tabindex="0">${visible(checked.command)}</pre>
          <p class="faint">${t("run_goes_on")}</p>
          <h3>${t("changed")}</h3><table><tbody>${changed.map(([key, [usual, own]]) => html`<tr><th scope="row"><code>${visible(key)}</code></th><td><code>${visible(JSON.stringify(own))}</code></td><td class="faint"><code>${visible(JSON.stringify(usual) ?? "–")}</code></td></tr>`)}</tbody></table>
          <h3>${t("equation")}</h3><pre class="page" tabindex="0">${visible(checked.equation)}</pre>`
        : html`<div class="failure" role="alert"><pre>${visible(checked.failed || checked.errors.join("\n"))}</pre></div>`}
      </div></div>`;
}
