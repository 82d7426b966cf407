// One run: a verdict in words, curves, completions, config, log.
import { html, get, post, useState, useEffect, useRef, useGet, number, duration, Ago, link, Status, Failure, Loading, visible } from "./lib.js";
import { t } from "./i18n.js";
import { Charts, FIRST } from "./charts.js";
import { findingName, Said } from "./findings.js";
import { Rollouts } from "./rollouts.js";
import { heldOut } from "./runs.js";

const TABS = ["overview", "charts", "rollouts", "config", "log"];

/** What there is to say, the most important first. */
function verdict(run) {
  const lines = [];
  const place = { step: run.step, steps: run.steps ?? "?" };
  const left = run.eta_s === null ? "" : ` ${t("left_sentence", { time: duration(run.eta_s) })}`;
  const failed = run.status === "failed" && run.failure.error;
  lines.push(failed ? t("verdict_error", { ...place, error: run.failure.error }) : t(`verdict_${run.status}`, place) + left);
  const errors = run.findings.filter((found) => found.severity === "error");
  if (errors.length) lines.push(t("verdict_errors", { n: errors.length, step: errors[0].step, name: findingName(errors[0].id) }));
  else if (run.findings.length) lines.push(t("verdict_warnings", { n: run.findings.length, step: run.findings[0].step, name: findingName(run.findings[0].id) }));
  else if (run.step) lines.push(t("verdict_healthy"));
  for (const source of Object.keys(run.held_out)) {
    const metric = run.evaluations.find((name) => name.startsWith(`val-core/${source}/acc/mean@`) || name === `eval/${source}_accuracy`);
    const given = run.evaluated.filter((row) => row.values[metric] !== null && row.values[metric] !== undefined);
    if (given.length > 1) lines.push(t("verdict_accuracy", { source, from: number(given[0].values[metric]), to: number(given[given.length - 1].values[metric]), step: given[given.length - 1].step }));
    else if (given.length === 1) lines.push(t("verdict_accuracy_one", { source, value: number(given[0].values[metric]), step: given[0].step }));
  }
  return lines;
}

/** Which completions show what a rule found: of most rules all do. */
const SHOWN = {
  length_limit: { finish_reason: "length" },
  missing_stop_token: { finish_reason: "length" },
  pays_for_length: { sort: "length", descending: "true" },
  reward_without_accuracy: { sort: "reward", descending: "true" },
};

function Finding({ run, found }) {
  // A rule speaks of its step and of those before, which have to agree.
  const query = new URLSearchParams({ first_step: String(Math.max(1, found.step - 2)), last_step: String(found.step), split: "train", ...SHOWN[found.id] });
  const level = found.severity === "error" ? "error" : "warning";
  return html`<li class=${`finding ${level}`}>
    <h3><span class=${level}><span aria-hidden="true">${level === "error" ? "✕" : "!"}</span> ${t(level)}</span> ${visible(findingName(found.id))} <small>${t("since_step", { step: found.step })}</small></h3>
    <${Said} found=${found} />
    <p><a href=${link(["run", run.id, "rollouts"], query)}>${t("evidence", { from: query.get("first_step"), to: found.step })}</a>
      <span class="faint"> · ${visible(found.page)}</span></p>
  </li>`;
}

function Overview({ run }) {
  const environment = run.environment;
  const facts = [
    ["algorithm", run.algorithm], ["model", run.model], ["seed", number(run.seed)], ["learning_rate", number(run.learning_rate)],
    ["step_seconds", run.step_seconds === null ? "–" : `${number(run.step_seconds)} s`], ["updated", run.updated], ["started", run.started],
    ["known_by", run.why], ["command", environment.command],
    ["machine", environment.cpu && `${environment.cpu}, ${environment.cpus}${(environment.gpus || []).length ? `, ${environment.gpus.join(", ")}` : ""}`],
    ["commit", environment.git && `${String(environment.git.commit).slice(0, 10)}${environment.git.modified ? " +" : ""}`],
    ["resumed", (environment.resumed || []).map((attempt) => attempt.first_step).join(", ")],
  ].filter(([, value]) => value);
  return html`
    <section class=${`verdict ${run.findings.some((found) => found.severity === "error") || run.status === "failed" ? "bad" : run.findings.length ? "warn" : "good"}`} aria-label=${t("verdict")}>
      ${verdict(run).map((line, i) => (i ? html`<p>${visible(line)}</p>` : html`<p class="first">${visible(line)}</p>`))}
      ${run.failure.error && html`<details><summary>${t("where_it_failed")} <code>${visible(run.failure.where)}</code></summary><pre class="text" tabindex="0">${visible(run.failure.traceback)}</pre></details>`}
    </section>
    ${run.findings.length > 0 && html`<section><h2>${t("findings")}</h2><ul class="findings">${run.findings.map((found) => html`<${Finding} run=${run} found=${found} />`)}</ul></section>`}
    <section><h2>${t("curves")}</h2><${Charts} run=${run} which=${FIRST} /></section>
    <section class="two">
      ${run.evaluated.length > 0 && html`<div><h2>${t("evaluations")}</h2><${Evaluations} run=${run} /></div>`}
      <div><h2>${t("facts")}</h2><dl class="facts">${facts.map(([name, value]) => html`<div><dt>${t(name)}</dt><dd>${name === "updated" ? html`<${Ago} time=${value} />` : visible(value)}</dd></div>`)}</dl></div>
    </section>
    ${run.problems.length > 0 && html`<section><h2>${t("unreadable")}</h2><ul>${run.problems.map((line) => html`<li>${visible(line)}</li>`)}</ul></section>`}`;
}

function Evaluations({ run }) {
  const shown = run.evaluations.filter((name) => run.evaluated.some((row) => row.values[name] !== null)).slice(0, 8);
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${t("evaluations")}><table>
    <thead><tr><th scope="col">${t("step")}</th>${shown.map((name) => html`<th scope="col" title=${name}>${visible(name.replace(/^val-(core|aux)\//, ""))}</th>`)}</tr></thead>
    <tbody>${run.evaluated.map((row) => html`<tr><th scope="row"><a href=${link(["run", run.id, "rollouts"], new URLSearchParams({ first_step: row.step, last_step: row.step, split: "eval" }))}>${row.step}</a></th>
      ${shown.map((name) => html`<td>${number(row.values[name])}</td>`)}</tr>`)}</tbody></table></div>`;
}

function Config({ run }) {
  const [config, error] = useGet(`/api/runs/${run.id}/config`, []);
  const [about, failure] = useGet(`/api/runs/${run.id}/about`, []);
  const [text, setText] = useState("");
  if (!config) return error ? html`<${Failure} error=${error} />` : html`<${Loading} />`;
  const found = about || {};
  const changed = Object.entries(found.changed || {});
  const lines = config.yaml.split("\n").filter((line) => !text || line.toLowerCase().includes(text.toLowerCase()));
  return html`
    ${!about && !failure && html`<p role="status" class="loading">${t("asking_schema")}</p>`}<${Failure} error=${failure} />
    ${(found.errors || []).length > 0 && html`<div class="failure" role="alert"><p>${t("other_version")}</p><pre>${visible(found.errors.join("\n"))}</pre></div>`}
    ${found.failed && html`<p class="failure" role="alert">${visible(found.failed)}</p>`}
    ${changed.length > 0 && html`<h2>${t("changed")}</h2><div class="scroll" tabindex="0" role="region" aria-label=${t("changed")}><table><thead><tr><th scope="col">${t("key")}</th><th scope="col">${t("value_of")}</th><th scope="col">${t("default")}</th></tr></thead>
      <tbody>${changed.map(([key, [usual, own]]) => html`<tr><th scope="row"><code>${visible(key)}</code></th><td><code>${visible(JSON.stringify(own))}</code></td><td class="faint"><code>${visible(JSON.stringify(usual) ?? "–")}</code></td></tr>`)}</tbody></table></div>`}
    ${found.equation && html`<h2>${t("equation")}</h2><pre class="page" tabindex="0">${visible(found.equation)}</pre>`}
    <h2>config.yaml</h2>
    <label><span class="hidden">${t("search")}</span><input type="search" placeholder=${t("search_config")} value=${text} onInput=${(event) => setText(event.target.value)} /></label>
    <pre class="page" tabindex="0" aria-label="config.yaml">${visible(lines.join("\n"))}</pre>`;
}

function Log({ run }) {
  const [text, setText] = useState(null);
  const [error, setError] = useState(null);
  const end = useRef(0);
  const own = useRef(null);
  const read = async () => {
    try {
      const found = await get(`/api/runs/${run.id}/log?after=${end.current}`);
      if (found.text === null) return setText(null);
      const other = own.current !== null && own.current !== found.own; // its log is another file by now
      own.current = found.own;
      if (other) {
        end.current = 0;
        setText(null);
        return read();
      }
      const anew = found.start !== end.current;
      end.current = found.end;
      setText((old) => (anew || old === null ? found.text : old + found.text).slice(-400000));
      setError(null);
    } catch (failure) {
      setError(failure);
    }
  };
  useEffect(() => {
    read();
    const timer = setInterval(() => document.hidden || read(), 2000);
    return () => clearInterval(timer);
  }, [run.id]);
  if (error) return html`<${Failure} error=${error} />`;
  return text === null ? html`<p class="empty">${t("no_log")}</p>` : html`<pre class="page log" tabindex="0" aria-label=${t("log")}>${visible(text)}</pre>`;
}

function Actions({ run, reload }) {
  const [said, setSaid] = useState(null);
  if (!run.launch) return null;
  const act = async (what) => {
    try {
      await post(`/api/runs/${run.id}/${what}`, {});
      setSaid(t(`${what}_asked`));
      setTimeout(reload, 1000);
    } catch (error) {
      setSaid(error.message);
    }
  };
  return html`<span class="actions">
    ${run.status === "running" && html`<button onClick=${() => act("stop")}>${t("stop")}</button>`}
    ${(run.status === "stopped" || run.status === "failed") && html`<button onClick=${() => act("resume")}>${t("resume")}</button>`}
    <a class="button" href=${link(["new"], new URLSearchParams({ from: run.id }))}>${t("variant")}</a>
    <span role="status">${said}</span></span>`;
}

export function RunPage({ id, tab, rest, query }) {
  const [run, error, reload, fresh] = useGet(`/api/runs/${id}`, [id], 1000); // curves come by themselves
  useEffect(() => {
    if (run) document.title = `${run.name} · AtomRL`;
  }, [run && run.name]);
  if (!run || !fresh) return error ? html`<h1>${t("run")}</h1><${Failure} error=${error} />` : html`<${Loading} />`;
  return html`
    <h1>${visible(run.name)} <${Status} status=${run.status} /></h1>
    <p class="sub">${visible(run.algorithm)} · ${t("step")} ${run.step}${run.steps ? ` / ${run.steps}` : ""}${run.eta_s !== null ? ` · ${t("left", { time: duration(run.eta_s) })}` : ""}
      ${heldOut(run) !== null && html` · ${t("held_out")} ${number(heldOut(run))}`} <${Actions} run=${run} reload=${reload} /></p>
    <${Failure} error=${error} />
    <nav class="tabs" aria-label=${t("parts")}>${TABS.map((name) => html`<a href=${link(["run", id, name])} aria-current=${tab === name ? "page" : undefined}>${t(name)}</a>`)}</nav>
    ${tab === "charts" ? html`<p class="faint">${t("charts_hint")}</p><${Charts} run=${run} all=${true} />`
      : tab === "rollouts" ? html`<${Rollouts} run=${run} rest=${rest} query=${query} />`
      : tab === "config" ? html`<${Config} run=${run} />`
      : tab === "log" ? html`<${Log} run=${run} />`
      : html`<${Overview} run=${run} />`}`;
}
