// What a server adds to the report: the state of each run as it comes, a report that follows it, and the form for acts.

{
  const panel = document.getElementById("live"), cards = document.getElementById("live-runs"), link = document.getElementById("link");
  const follow = document.getElementById("follow"), form = document.getElementById("acts-form");
  const token = new URLSearchParams(location.search).get("token"), known = new Map(), news = [];
  const before = JSON.parse(sessionStorage.getItem("before-reload") ?? "{}"); // what this page showed when it loaded itself anew
  let wanted = panel.dataset.version, had = panel.dataset.version, next = 0, quiet = 0, fetching = false;

  const put = (node, text) => {
    if (node.textContent !== text) node.textContent = text; // else a screen reader would say it again
  };
  const copies = (node) => [...node.childNodes].map((child) => document.importNode(child, true));
  const add = (node, name, className, text) => node.appendChild(html(name, className, text));

  // -- the cards of the runs -----------------------------------------------------------------------

  function cardOf(run) {
    const node = add(cards, "article", "card live"), head = add(node, "h3", "");
    if (run.link) {
      const target = new URLSearchParams({ run: run.name, token });
      add(head, "a", "", run.name).href = `?${target}`;
    } else put(head, run.name);
    const line = add(node, "p", ""), dot = add(line, "span", "state"), text = add(line, "span", "");
    const bar = add(node, "progress", ""), figures = add(node, "p", "note"), values = add(node, "dl", ""), news = add(node, "ul", "news");
    dot.setAttribute("aria-hidden", "true");
    bar.max = 1;
    bar.setAttribute("aria-label", `progress of ${run.name}`);
    const { state = run.state, seen = run.news.map(({ text }) => text) } = before.cards?.[run.name] ?? {};
    return { node, dot, text, bar, figures, values, news, state, seen: new Set(seen) };
  }

  function show(run) {
    const card = known.get(run.name) ?? cardOf(run);
    known.set(run.name, card);
    card.dot.className = `state ${run.look}`;
    put(card.text, run.sentence);
    card.bar.hidden = run.fraction === null;
    if (run.fraction !== null) card.bar.value = run.fraction;
    put(card.figures, run.figures);
    card.values.replaceChildren(...run.values.map(([name, value]) => {
      const pair = html("div", "");
      pair.append(html("dt", "", name), html("dd", "", value));
      return pair;
    }));
    card.news.replaceChildren(...run.news.map(({ text, kind }) => html("li", kind, text)));
    const fresh = run.news.filter(({ text, kind }) => kind && !card.seen.has(text)).map(({ text }) => text);
    if (run.state !== card.state) fresh.push(run.sentence);
    card.seen = new Set(run.news.map(({ text }) => text));
    card.state = run.state;
    return fresh.map((text) => `${run.name}: ${text}`);
  }

  function take({ runs: states, version }) {
    news.push(...states.flatMap(show));
    if (news.length && Date.now() > quiet) { // a screen reader needs time for the news before
      say(news.splice(0).slice(-3).join(". "));
      quiet = Date.now() + 5000;
    }
    if (form) {
      document.getElementById("acts-fields").disabled = !states[0].acts;
      document.getElementById("acts-none").hidden = states[0].acts;
    }
    wanted = version;
  }

  function connect() {
    const source = new EventSource(`events${location.search}`);
    source.addEventListener("open", () => put(link, "connected"));
    source.addEventListener("message", (event) => take(JSON.parse(event.data)));
    source.addEventListener("error", () => {
      put(link, "no connection, trying again");
      if (source.readyState !== EventSource.CLOSED) return; // else the browser tries again
      source.close();
      setTimeout(connect, 3000);
    });
  }

  // -- the report ----------------------------------------------------------------------------------

  const busy = (node) => node.contains(document.activeElement) && document.activeElement !== document.body;

  function replaceInside(node, fresh) {
    if (node.dataset.fresh === fresh.innerHTML || busy(node)) return;
    node.dataset.fresh = fresh.innerHTML;
    const open = [...node.querySelectorAll("details")].map((one) => one.open);
    node.replaceChildren(...copies(fresh));
    node.querySelectorAll("details").forEach((one, i) => (one.open = open[i] ?? one.open));
    sliders(node);
  }

  function replaceSections(page) {
    const parts = [...page.querySelectorAll("main > section:not(#live)")].map((section) => section.id);
    for (const id of parts) {
      if (id === "curves") continue;
      const fresh = page.getElementById(id), node = document.getElementById(id);
      if (id === "runs") replaceRows(fresh);
      else if (node) replaceInside(node, fresh);
      else document.querySelector("main").insertBefore(document.importNode(fresh, true), document.getElementById(parts[parts.indexOf(id) + 1]));
    }
    for (const part of ["nav", "main > .cards"]) {
      const node = document.querySelector(part), fresh = page.querySelector(part);
      if (node && fresh) replaceInside(node, fresh);
    }
  }

  function replaceRows(fresh) {
    for (const row of fresh.querySelectorAll("tr[data-run]")) {
      const node = document.querySelector(`#runs tr[data-run="${row.dataset.run}"]`);
      node?.replaceChildren(...copies(row));
    }
  }

  function replaceCurves(page, data) {
    [span[0], span[1]] = data.span;
    acts.splice(0, acts.length, ...data.acts);
    for (const chart of charts) {
      const fresh = page.querySelector(`figure[data-chart="${chart.number}"]`), details = chart.figure.querySelector(".values");
      const caption = chart.figure.querySelector("figcaption"), other = fresh.querySelector("figcaption");
      const count = [...chart.figure.querySelectorAll("p.count")].find((node) => node !== chart.ranges);
      chart.lines = linesOf(data.charts[chart.number]);
      if (caption.textContent !== other.textContent) caption.replaceChildren(...copies(other));
      put(count, fresh.querySelector("p.count").textContent);
      put(chart.svg.querySelector("desc"), fresh.querySelector("desc").textContent);
      if (details.open && !busy(details)) details.dispatchEvent(new Event("toggle"));
    }
    refine();
    charts.forEach(draw);
  }

  // A value of a new name needs a new page: it is loaded when nothing is typed into the form. Until then the curves stay.
  function isOther(data) {
    const names = (list) => JSON.stringify(list.map((one) => one.name));
    return names(data.charts ?? []) !== names(charts) || names(data.runs) !== names(runs);
  }

  const typed = () => form && [...form.querySelectorAll("input")].some((input) => input.value !== input.defaultValue);

  // Nothing that was announced, or waits to be, is lost by it.
  function reload() {
    const seen = [...known].map(([name, { state, seen }]) => [name, { state, seen: [...seen] }]);
    const [result, said] = ["act-result", "said"].map((id) => document.getElementById(id)?.textContent ?? "");
    sessionStorage.setItem("before-reload", JSON.stringify({ cards: Object.fromEntries(seen), news, result, said }));
    location.reload();
  }

  async function renew() {
    if (fetching || !follow.checked || wanted === had || document.hidden || Date.now() < next) return;
    fetching = true;
    const began = Date.now(), version = wanted;
    try {
      const answer = await fetch(location.href.split("#")[0]);
      if (!answer.ok) return;
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const data = JSON.parse(page.getElementById("data").textContent);
      const other = isOther(data);
      if (other && !typed()) {
        reload();
        return;
      }
      if (charts.length && !other) replaceCurves(page, data);
      replaceSections(page);
      if (!other) had = version; // else the page is loaded when nothing is typed any more
    } catch {
      put(link, "no connection, trying again");
    } finally {
      fetching = false;
      next = Date.now() + Math.max(3000, 4 * (Date.now() - began)); // a page of long runs takes the server a while
    }
  }

  // -- acts ----------------------------------------------------------------------------------------

  async function act(verb, given) {
    const result = document.getElementById("act-result"), reason = document.getElementById("act-reason").value;
    put(result, `${verb}: sent`);
    try {
      const answer = await fetch(`tell${location.search}`, {
        method: "POST",
        headers: { "Content-Type": "application/json", Authorization: `Bearer ${token}` },
        body: JSON.stringify({ verb, arguments: given, reason }),
      });
      put(result, answer.ok ? (await answer.json()).text : `${verb}: ${await answer.text()}`);
      if (answer.ok) form.reset();
    } catch {
      put(result, `${verb}: the server does not answer`);
    }
  }

  const field = (id) => document.getElementById(id).value.trim();
  const number = (text) => (text !== "" && Number.isFinite(Number(text)) ? Number(text) : text);

  // Enter in a field acts as the button of its row, and not as the first button of the form.
  form?.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.target.tagName !== "INPUT") return;
    event.preventDefault();
    event.target.closest(".acts-row").querySelector("button")?.click();
  });

  form?.addEventListener("submit", (event) => {
    event.preventDefault();
    const verb = event.submitter.dataset.verb;
    if (verb === "stop" && !confirm("Stop the run? It ends at its next step.")) return;
    const group = field("act-group");
    const given = {
      set: () => ({ [field("act-name")]: number(field("act-value")), ...(group ? { group: number(group) } : {}) }),
      note: () => ({ text: field("act-note") }),
    };
    act(verb, given[verb]?.() ?? {});
  });

  sessionStorage.removeItem("before-reload");
  news.push(...(before.news ?? []));
  say(before.said ?? "");
  if (form) put(document.getElementById("act-result"), before.result ?? "");
  follow.addEventListener("change", renew);
  connect();
  setInterval(renew, 500);
}
