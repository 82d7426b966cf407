// The documentation pages of a checkout: trees of known tags, built without parsing HTML.
import { html, h, useState, useEffect, useGet, link, Failure, Loading, visible } from "./lib.js";
import { t, inChinese } from "./i18n.js";

const TAGS = new Set(["h1", "h2", "h3", "h4", "p", "ul", "ol", "li", "blockquote", "strong", "em", "hr", "br", "table", "thead", "tbody", "tr", "th", "td", "pre", "code", "a"]);

/** Build elements from a tree of the server: a text, or a tag with a link or an anchor and its children. */
function drawn(tree) {
  if (typeof tree === "string") return visible(tree);
  const [tag, { href, id }, children] = tree;
  if (!TAGS.has(tag)) return children.map(drawn);
  if (tag === "table") return h("div", { class: "scroll", tabindex: 0, role: "region" }, h("table", {}, children.map(drawn)));
  if (tag === "pre") return h("pre", { class: "page", tabindex: 0 }, children.map(drawn));
  const away = href && !href.startsWith("#") ? { target: "_blank", rel: "noopener noreferrer" } : {};
  return h(tag, { ...(href && { href }), ...(id && { id: `at-${id}` }), ...away }, children.map(drawn));
}

function Index() {
  const [found, error] = useGet("/api/docs", []);
  const [text, setText] = useState("");
  if (!found) return error ? html`<${Failure} error=${error} />` : html`<${Loading} />`;
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const pages = found.pages.filter(([name, title]) => words.every((word) => `${name} ${title}`.toLowerCase().includes(word)));
  const folders = [...new Set(pages.map(([name]) => name.split("/").slice(0, -1).join("/")))];
  return html`<h1>${t("manual")}</h1><p class="sub">${t("manual_hint")}${inChinese() ? ` ${t("manual_english")}` : ""}</p>
    <label><span class="hidden">${t("search")}</span><input type="search" placeholder=${t("search_pages")} value=${text} onInput=${(event) => setText(event.target.value)} /></label>
    ${pages.length === 0 && html`<p class="empty">${t(found.pages.length ? "nothing_found" : "manual_absent")}</p>`}
    ${folders.map((folder) => html`<section key=${folder}><h2>${t(folder ? `manual_${folder}` : "manual_pages")}</h2><ul class="titles">
      ${pages.filter(([name]) => name.split("/").slice(0, -1).join("/") === folder).sort(([one, a], [other, b]) => Number(other.endsWith("README")) - Number(one.endsWith("README")) || a.localeCompare(b)).map(([name, title]) => html`<li><a href=${link(["docs", ...name.split("/")])}>${visible(title)}</a></li>`)}</ul></section>`)}`;
}

/** @param {{path: string[], query: URLSearchParams}} props */
export function Docs({ path, query }) {
  return path.length ? html`<${Page} name=${path.join("/")} at=${query.get("at")} />` : html`<${Index} />`;
}

function Page({ name, at }) {
  const [found, error, , fresh] = useGet(`/api/docs/${name.split("/").map(encodeURIComponent).join("/")}`, []);
  useEffect(() => {
    if (!found || !fresh) return;
    document.title = `${found.title} · AtomRL`;
    const target = at && document.getElementById(`at-${at}`);
    if (target) target.scrollIntoView();
    else scrollTo(0, 0);
  }, [found, fresh, at]);
  if (!found || !fresh) return error ? html`<${Failure} error=${error} />` : html`<${Loading} />`;
  return html`<p class="sub"><a href="#/docs">${t("manual")}</a> / ${visible(name)}${inChinese() ? ` · ${t("manual_english")}` : ""}</p><article class="manual" lang="en">${found.tree.map(drawn)}</article>`;
}
