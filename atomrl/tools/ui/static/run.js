// The page of a run: tabs, config, log, and buttons to stop and resume it.
import { html, get, post, useState, useEffect, useLayoutEffect, useRef, useGet, duration, link, Status, Failure, Loading, visible } from "./lib.js";
import { t } from "./i18n.js";
import { Charts } from "./charts.js";
import { Overview } from "./overview.js";
import { Rollouts } from "./rollouts.js";
import { Silent } from "./runs.js";

const TABS = ["overview", "charts", "rollouts", "config", "log"];

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
  const box = useRef(null);
  const atEnd = useRef(true); // opens at the end and follows it until the user scrolls up
  useLayoutEffect(() => {
    if (box.current && atEnd.current) box.current.scrollTop = box.current.scrollHeight;
  }, [text]);
  const read = async () => {
    try {
      const found = await get(`/api/runs/${run.id}/log?after=${end.current}`);
      if (found.text === null) return setText(null);
      const other = own.current !== null && own.current !== found.own; // the log is another file now
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
  return text === null ? html`<p class="empty">${t("no_log")}</p>` : html`<pre class="page log" ref=${box} onScroll=${({ target }) => (atEnd.current = target.scrollHeight - target.scrollTop - target.clientHeight < 8)} tabindex="0" aria-label=${t("log")}>${visible(text)}</pre>`;
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
  const [run, error, reload, fresh] = useGet(`/api/runs/${id}`, [id], 1000); // curves are fetched separately
  useEffect(() => {
    if (run) document.title = `${run.name} · AtomRL`;
  }, [run && run.name]);
  if (!run || !fresh) return error ? html`<h1>${t("run")}</h1><${Failure} error=${error} /><p><a href="#/">← ${t("runs")}</a></p>` : html`<${Loading} />`;
  return html`
    ${error && (error.status === 404 ? html`<p class="failure" role="alert">${t("run_gone")} <a href="#/">${t("runs")}</a></p>` : html`<${Failure} error=${error} />`)}
    <div class="title"><h1>${visible(run.name)} <${Status} status=${run.status} /> <${Silent} run=${run} /></h1><${Actions} run=${run} reload=${reload} /></div>
    <p class="sub">${visible(run.algorithm)} · ${t("step")} ${run.step}${run.steps ? ` / ${run.steps}` : ""}${run.eta_s !== null && run.silent_s === null ? ` · ${t("left", { time: duration(run.eta_s) })}` : ""}</p>
    <nav class="tabs" aria-label=${t("parts")}>${TABS.map((name) => html`<a href=${link(["run", id, name])} aria-current=${tab === name ? "page" : undefined}>${t(name)}</a>`)}</nav>
    ${tab === "charts" ? html`<${Charts} run=${run} all=${true} />`
      : tab === "rollouts" ? html`<${Rollouts} run=${run} rest=${rest} query=${query} />`
      : tab === "config" ? html`<${Config} run=${run} />`
      : tab === "log" ? html`<${Log} run=${run} />`
      : html`<${Overview} run=${run} query=${query} />`}`;
}
