// The overview of a run: verdict, findings, newest completions, and one prompt before and after.
import { html, useGet, number, count, duration, Ago, Explain, link, Spark, tint, visible } from "./lib.js";
import { t } from "./i18n.js";
import { Charts } from "./charts.js";
import { findingName, hasPage, Said } from "./findings.js";

/** Return the messages about a run, the most important first. */
function verdict(run) {
  const lines = [];
  const place = { step: run.step, steps: run.steps ?? "?" };
  const left = run.eta_s === null || run.silent_s !== null ? "" : ` ${t("left_sentence", { time: duration(run.eta_s) })}`;
  const failed = run.status === "failed" && run.failure.error;
  lines.push(failed ? t("verdict_error", { ...place, error: run.failure.error }) : t(`verdict_${run.status}`, place) + left);
  if (run.silent_s !== null) lines.push(t("verdict_silent", { time: duration(run.silent_s), pace: duration(run.step_seconds) }));
  const errors = run.findings.filter((found) => found.severity === "error");
  if (errors.length) lines.push(t("verdict_errors", { n: errors.length, step: errors[0].step, name: findingName(errors[0].id) }));
  else if (run.findings.length) lines.push(t("verdict_warnings", { n: run.findings.length, step: run.findings[0].step, name: findingName(run.findings[0].id) }));
  else if (run.step && run.status !== "failed" && run.silent_s === null) lines.push(t("verdict_healthy"));
  return lines;
}

/** @param {{name: string, value: any, under?: any, hint?: string, spark?: [number[], number[]]}} props */
function Tile({ name, value, under = null, hint = "", spark = null }) {
  return html`<div class=${`tile ${spark ? "course" : ""}`} title=${hint}><dt>${name}</dt>
    <dd class="figure">${value}${spark && html` <${Spark} points=${spark} />`}</dd>
    ${under && html`<dd class="under">${under}</dd>`}</div>`;
}

/** A tile: first and last value, and the best with its step. */
function Course({ name, about, lower, hint }) {
  const { first, last } = about;
  const best = lower ? about.least : about.largest;
  const change = last[1] - first[1];
  const good = lower ? change < 0 : change > 0;
  const value = first[0] === last[0] ? number(last[1]) : html`<span class="was">${number(first[1])} →</span> ${number(last[1])}`;
  const under = first[0] === last[0] ? t("at_step", { step: last[0] }) : about.least[1] === about.largest[1] ? t("always_same")
    : html`${change !== 0 && html`<span class=${good ? "gain" : "loss"}>${change > 0 ? "▲" : "▼"} ${number(Math.abs(change))}</span> · `}${t("best_at", { value: number(best[1]), step: best[0] })}`;
  return html`<${Tile} name=${name} value=${value} under=${under} hint=${hint} spark=${about.spark} />`;
}

function Tiles({ run }) {
  const { seconds, tokens, throughput, best, newest } = run.outcome;
  const kept = best || newest;
  const judged = run.held_out.some((about) => about.source === "all") ? run.held_out.slice(0, 1) : run.held_out.slice(0, 3);
  return html`<dl class="tiles">
    ${judged.map((about) => html`<${Course} key=${about.name} about=${about} lower=${about.kind === "loss"} hint=${`${t("held_out_hint")} (${about.name})`}
      name=${html`${t(`held_out_${about.kind}`)}${about.source && html` <small>${visible(about.source === "all" ? t("all_sources") : about.source)}</small>`}`} />`)}
    ${run.reward && html`<${Course} name=${t("training_reward")} about=${run.reward} hint=${`${t("reward_hint")} (${run.reward.name})`} />`}
    ${run.loss && html`<${Course} name=${t("training_loss")} about=${run.loss} lower=${true} hint=${run.loss.name} />`}
    <${Tile} name=${t("time")} value=${seconds ? duration(seconds) : "–"} under=${run.step_seconds !== null && t("a_step", { time: number(run.step_seconds) })} />
    ${tokens > 0 && html`<${Tile} name=${t("tokens")} value=${count(tokens)} under=${throughput !== null && t("a_second", { n: count(throughput) })} hint=${t("tokens_hint")} />`}
    ${kept && html`<${Tile} name=${t(best ? "best_checkpoint" : "newest_checkpoint")} value=${kept.step === null ? "✓" : t("step_no", { n: kept.step })} under=${html`<code>${visible(kept.path)}</code>`} hint=${kept.path} />`}
  </dl>
  <${Explain} terms=${[
    ...(judged.length ? [[t(`held_out_${judged[0].kind}`), t(`held_out_${judged[0].kind}_hint`)]] : []),
    ...(run.reward ? [[t("training_reward"), t("reward_hint")], [`${t("advantage")} (A)`, t("advantage_hint")], [t("cut"), t("cut_hint")]] : []),
    ...(run.loss ? [[t("training_loss"), t("loss_hint")]] : []),
    [t("tokens"), t("tokens_hint")],
    [t("best_checkpoint"), t("best_checkpoint_hint")],
  ]} />`;
}

/** Query of the completions that show a finding; for most rules, all of its steps. */
const SHOWN = {
  length_limit: { finish_reason: "length" },
  missing_stop_token: { finish_reason: "length" },
  pays_for_length: { sort: "length", descending: "true" },
  reward_without_accuracy: { sort: "reward", descending: "true" },
};

function Finding({ run, found }) {
  // A rule needs several steps in agreement: its own and those before.
  const query = new URLSearchParams({ first_step: String(Math.max(1, found.step - 2)), last_step: String(found.step), split: "train", ...SHOWN[found.id] });
  const level = found.severity === "error" ? "error" : "warning";
  return html`<li class=${`finding ${level}`}>
    <h3><span class=${level}><span aria-hidden="true">${level === "error" ? "✕" : "!"}</span> ${t(level)}</span> ${visible(findingName(found.id))} <small>${t("since_step", { step: found.step })}</small></h3>
    <${Said} found=${found} />
    <p class="links"><a href=${link(["run", run.id, "rollouts"], query)}>${t("evidence", { from: query.get("first_step"), to: found.step })}</a>
      ${hasPage(found.id) && html`<a href=${link(["docs", "guides", "troubleshooting", found.id])}>${t("about_finding")}</a>`}</p>
  </li>`;
}

const at = (run, row) => link(["run", run.id, "rollouts", String(row.step), row.split, String(row.place)], row.split === "train" ? new URLSearchParams({ first_step: row.step, last_step: row.step }) : new URLSearchParams({ first_step: row.step, last_step: row.step, split: row.split }));

/** One line with reward, advantage and length of a completion. @param {{run: any, row: any, scale?: number, answer?: boolean}} props */
function Figures({ run, row, scale = 1, answer = false }) {
  return html`<p class="figures"><a href=${at(run, row)}>${t("reward")} <strong>${number(row.reward)}</strong></a>
    ${row.advantage !== null && html`<span class=${tint(row.advantage, scale)} title=${t("advantage_hint")}>A ${number(row.advantage)}</span>`}
    <span class="faint">${t("n_tokens", { n: row.tokens ?? "?" })}</span>${row.turns > 1 && html`<span class="faint">${t("turns", { n: row.turns })}</span>`}${row.finish === "length" && html`<span class="warning" title=${t("cut_hint")}>! ${t("cut")}</span>`}
    ${answer && hasAnswer(row) && html`<span class="faint">${t("ground_truth")} <code>${visible(answerOf(row).slice(0, 200))}</code></span>`}</p>`;
}

const answerOf = (row) => (typeof row.ground_truth === "string" ? row.ground_truth : JSON.stringify(row.ground_truth));
const hasAnswer = (row) => row.ground_truth !== null && row.ground_truth !== undefined && row.ground_truth !== "";

/** A prompt with one completion. */
function Sample({ run, row, scale }) {
  return html`<li class="sample">
    <pre class="text asked" tabindex="0" aria-label=${t("prompt")}>${visible(row.prompt)}</pre>
    <pre class="text wrote" tabindex="0" aria-label=${t("completion")}>${row.completion ? visible(row.completion) : html`<em class="faint">${t("nothing_written")}</em>`}${row.cut_short ? " …" : ""}</pre>
    <${Figures} run=${run} row=${row} scale=${scale} answer=${true} /></li>`;
}

/** The newest completions; updated while the run continues. */
function Writes({ run }) {
  const [found] = useGet(`/api/runs/${run.id}/glimpse`, [run.id], 1500);
  if (!found || found.step === null) return null;
  const scale = Math.max(1e-9, ...[...found.newest, ...found.worst].map((row) => Math.abs(row.advantage || 0)));
  return html`<section class="writes"><h2>${t("what_it_writes")} <small>${t("step_no", { n: found.step })} · ${t("n_completions", { n: found.completions.toLocaleString() })} · ${t("mean_reward", { value: number(found.mean) })}${run.status === "running" ? ` · ${t("live")}` : ""}</small></h2>
    <div class=${found.worst.length ? "two" : ""}><div><h3>${t("first_ones")} <small>${t("first_ones_hint")}</small></h3><ul class="samples two">${found.newest.map((row) => html`<${Sample} key=${`${row.step} ${row.place}`} run=${run} row=${row} scale=${scale} />`)}</ul></div>
      ${found.worst.length ? html`<div><h3>${t("worst")} <small>${t("worst_hint")}</small></h3><ul class="samples two">${found.worst.map((row) => html`<${Sample} key=${`${row.step} ${row.place}`} run=${run} row=${row} scale=${scale} />`)}</ul></div>`
        : html`<p class="faint">${found.mean === null ? t("no_rewards") : t("none_worse", { value: number(found.mean) })}</p>`}</div></section>`;
}

function Side({ run, title, side }) {
  return html`<div class="side"><h3>${title} <small>${t("step_no", { n: side.step })} · ${t("mean_reward", { value: number(side.mean) })}</small></h3>
    ${side.members.map((row) => html`<div class="sample" key=${row.place}><pre class="text wrote" tabindex="0" aria-label=${t("completion")}>${row.completion ? visible(row.completion) : html`<em class="faint">${t("nothing_written")}</em>`}${row.cut_short ? " …" : ""}</pre><${Figures} run=${run} row=${row} scale=${Math.max(1e-9, ...side.members.map((one) => Math.abs(one.advantage || 0)))} /></div>`)}
    ${side.of > side.members.length && html`<p class="faint">${t("and_more", { n: side.of - side.members.length })}</p>`}</div>`;
}

/** One prompt at the first and at the newest step that has it. */
function BeforeAfter({ run, query }) {
  const asked = new URLSearchParams();
  for (const name of ["split", "change", "prompt"]) if (query.get(name)) asked.set(name, query.get(name));
  const [found, , , fresh] = useGet(`/api/runs/${run.id}/before-after?${asked}`, [run.id], 3000);
  if (!found || !found.splits.length) return null;
  const go = (change) => {
    const next = new URLSearchParams(asked);
    for (const [name, value] of Object.entries(change)) value ? next.set(name, value) : next.delete(name);
    location.hash = link(["run", run.id, "overview"], next).slice(1);
  };
  const change = query.get("change") || "";
  const shown = found.prompt;
  return html`<section class=${`before-after ${fresh ? "" : "old"}`}><h2>${t("before_after")} <small>${t("before_after_hint")}</small></h2>
    <div class="bar"><span class="choices" role="group" aria-label=${t("which_prompts")}>${["", "better", "worse", "same"].map((name) => html`<button aria-pressed=${name === change} disabled=${!found.counts[name || "all"]} onClick=${() => go({ change: name, prompt: "" })}>${t(`change_${name || "all"}`)} <span class="faint">${found.counts[name || "all"].toLocaleString()}</span></button>`)}</span>
      ${found.splits.length > 1 && html`<label>${t("prompts_of")} <select value=${found.split} onChange=${(event) => go({ split: event.target.value, prompt: "", change: "" })}>${found.splits.map((name) => html`<option value=${name}>${t(`split_${name}`)}</option>`)}</select></label>`}
      ${shown && html`<span class="pager"><button disabled=${!found.previous} onClick=${() => go({ prompt: found.previous })}>${t("before_one")}</button> ${t("nth_of", { n: found.at + 1, of: found.shown })} <button disabled=${!found.next} onClick=${() => go({ prompt: found.next })}>${t("next_one")}</button></span>`}</div>
    ${!shown ? html`<p class="empty">${t("nothing_found")}</p>` : html`<div class="one-prompt">
      <pre class="text asked" tabindex="0" aria-label=${t("prompt")}>${visible(shown.prompt)}</pre>
      <p class="faint answer">${hasAnswer(shown) && html`${t("ground_truth")} <code>${visible(answerOf(shown).slice(0, 200))}</code> · `}<a href=${link(["run", run.id, "rollouts", "prompt", shown.hash], new URLSearchParams({ split: found.split }))}>${t("every_step_of_prompt")}</a></p>
      <div class="two"><${Side} run=${run} title=${t("at_first")} side=${shown.before} /><${Side} run=${run} title=${t("at_last")} side=${shown.after} /></div></div>`}
  </section>`;
}

/** Format a time in the local time zone; unchanged if it is not a time. */
function dateOf(text) {
  const at = new Date(text);
  return Number.isNaN(at.getTime()) ? text : at.toLocaleString(document.documentElement.lang || "en", { dateStyle: "medium", timeStyle: "short" });
}

function Facts({ run }) {
  const environment = run.environment;
  const facts = [
    ["algorithm", run.algorithm], ["model", run.model], ["seed", number(run.seed)], ["learning_rate", number(run.learning_rate)],
    ["updated", run.updated], ["started", run.started && dateOf(run.started)], ["known_by", run.why], ["command", environment.command],
    ["machine", environment.cpu && `${environment.cpu}, ${environment.cpus}${(environment.gpus || []).length ? `, ${environment.gpus.join(", ")}` : ""}`],
    ["commit", environment.git && `${String(environment.git.commit).slice(0, 10)}${environment.git.modified ? " +" : ""}`],
    ["resumed", (environment.resumed || []).map((attempt) => attempt.first_step).join(", ")],
  ].filter(([, value]) => value);
  return html`<div><h2>${t("facts")}</h2><dl class="facts">${facts.map(([name, value]) => html`<div><dt>${t(name)}</dt><dd>${name === "updated" ? html`<${Ago} time=${value} />` : visible(value)}</dd></div>`)}</dl></div>`;
}

export function Overview({ run, query }) {
  const bad = run.findings.some((found) => found.severity === "error") || run.status === "failed";
  return html`
    <section class=${`verdict ${bad ? "bad" : run.findings.length || run.silent_s !== null ? "warn" : run.status === "running" ? "run" : "good"}`} aria-label=${t("verdict")}>
      ${verdict(run).map((line, i) => (i ? html`<p>${visible(line)}</p>` : html`<p class="first">${visible(line)}</p>`))}
      ${run.failure.error && html`<details><summary>${t("where_it_failed")} <code>${visible(run.failure.where)}</code></summary><pre class="text" tabindex="0">${visible(run.failure.traceback)}</pre></details>`}
    </section>
    <${Tiles} run=${run} />
    ${run.findings.length > 0 && html`<section><h2>${t("findings")}</h2><ul class="findings">${run.findings.map((found) => html`<${Finding} run=${run} found=${found} />`)}</ul></section>`}
    <${Writes} run=${run} />
    <${BeforeAfter} run=${run} query=${query} />
    <section><h2>${t("curves")}</h2><${Charts} run=${run} /></section>
    <section class="two">
      ${run.evaluated.length > 0 && html`<div><h2>${t("evaluations")}</h2><${Evaluations} run=${run} /></div>`}
      <${Facts} run=${run} />
    </section>
    ${run.problems.length > 0 && html`<section><h2>${t("unreadable")}</h2><ul>${run.problems.map((line) => html`<li>${visible(line)}</li>`)}</ul></section>`}`;
}

function Evaluations({ run }) {
  // With one completion per prompt, best@1 and maj@1 equal mean@1. Constant metrics are listed below the charts.
  const shown = run.evaluations.filter((name) => !/\/acc\/(maj|best)@1$/.test(name) && run.evaluated.some((row) => row.values[name] !== null) && (run.evaluated.length < 2 || !(name in run.constant))).slice(0, 8);
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${t("evaluations")}><table class="evaluations">
    <thead><tr><th scope="col">${t("step")}</th>${shown.map((name) => html`<th scope="col" title=${name}>${name.replace(/^(val-(core|aux)|eval)\//, "").split(/(?<=[/_])/).map((part) => [visible(part), html`<wbr />`])}</th>`)}</tr></thead>
    <tbody>${run.evaluated.map((row) => html`<tr><th scope="row" class="nowrap"><a href=${link(["run", run.id, "rollouts"], new URLSearchParams({ first_step: row.step, last_step: row.step, split: "eval" }))}>${row.step}</a></th>
      ${shown.map((name) => html`<td>${number(row.values[name])}</td>`)}</tr>`)}</tbody></table></div>`;
}
