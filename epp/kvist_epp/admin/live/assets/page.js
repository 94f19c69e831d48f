// Puts newer sections in place of older ones, as the server sends them. Without it the page is a plain one.
"use strict";
(() => {
  const SILENT_MS = 5000; // without an event, the connection counts as lost
  const RETRY_MS = 5000; // after a refusal, which browsers do not repeat
  const SAY_MS = 10000; // least time between two announcements to screen readers
  const element = (id) => document.getElementById(id);
  const assets = document.currentScript.dataset.assets;
  const connection = document.querySelector(".connection");
  const show = { find: "", show: "", order: "" };
  let sections = null; // the newest that were received, by id
  let process = null; // the greeting of the process that sends them
  let receivedAt = performance.now();
  let paused = false;
  let source = null;
  let attention = null;
  let saidAt = -Infinity;

  // -- sections

  function parsed(html) {
    const template = document.createElement("template");
    template.innerHTML = html;
    return template.content;
  }

  // Make `old` like `fresh` and keep its nodes: focus, selection and scroll positions stay.
  function morph(old, fresh) {
    if (old.nodeType === Node.ELEMENT_NODE) {
      for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
      for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    } else if (old.nodeValue !== fresh.nodeValue) {
      old.nodeValue = fresh.nodeValue;
    }
    morphChildren(old, fresh);
  }

  const keyOf = (node) => (node.dataset ? node.dataset.key : undefined);
  const alike = (one, other) => one.nodeType === other.nodeType && one.nodeName === other.nodeName && keyOf(one) === keyOf(other);

  function morphChildren(old, fresh) {
    const wanted = new Set([...fresh.childNodes].map(keyOf).filter((key) => key !== undefined));
    for (const child of [...old.childNodes]) if (keyOf(child) !== undefined && !wanted.has(keyOf(child))) child.remove();
    const byKey = new Map([...old.childNodes].filter((child) => keyOf(child) !== undefined).map((child) => [keyOf(child), child]));
    let at = old.firstChild;
    for (const child of [...fresh.childNodes]) {
      const known = byKey.get(keyOf(child));
      if (known !== undefined && known !== at) {
        old.insertBefore(known, at);
        morph(known, child);
      } else if (at !== null && alike(at, child)) {
        const next = at.nextSibling;
        morph(at, child);
        at = next;
      } else {
        old.insertBefore(child, at);
      }
    }
    while (at !== null) {
      const next = at.nextSibling;
      at.remove();
      at = next;
    }
  }

  function render() {
    if (sections === null || paused) return;
    for (const [id, html] of Object.entries(sections)) {
      const target = element(id);
      if (target === null) continue;
      const fresh = parsed(html);
      if (id === "endpoints") arrange(fresh);
      morphChildren(target, fresh);
    }
    announce();
  }

  // -- the table of endpoints: find, filter, order

  function arrange(root) {
    const body = root.querySelector(".endpoints tbody");
    if (body === null) return;
    const rows = [...body.children];
    if (show.order === "name") rows.sort((one, other) => one.dataset.name.localeCompare(other.dataset.name, undefined, { numeric: true }));
    else if (show.order) rows.sort((one, other) => other.dataset[show.order] - one.dataset[show.order]);
    let visible = 0;
    for (const row of rows) {
      row.hidden = !matches(row);
      visible += !row.hidden;
      body.append(row);
    }
    element("shown").textContent = visible < rows.length ? `${visible} of ${rows.length}` : "";
  }

  function matches(row) {
    const data = row.dataset;
    if (show.find && !data.name.toLowerCase().includes(show.find.toLowerCase())) return false;
    if (show.show === "attention") return Number(data.severity) >= 2;
    if (show.show === "approximate") return data.approximate === "1";
    return !show.show || data.state === show.show;
  }

  function viewChanged() {
    for (const id of Object.keys(show)) show[id] = element(id).value;
    if (sections === null || paused) arrange(element("endpoints"));
    else render();
  }

  // -- connection

  function connect() {
    source = new EventSource("live/events?as=page");
    source.addEventListener("hello", (message) => greet(JSON.parse(message.data)));
    source.addEventListener("page", (message) => {
      receivedAt = performance.now();
      sections = JSON.parse(message.data);
      render();
      freshness();
    });
    source.onerror = () => {
      freshness();
      if (source.readyState === EventSource.CLOSED) setTimeout(connect, RETRY_MS);
    };
  }

  function greet(hello) {
    if (hello.assets !== assets) {
      location.reload();
      return;
    }
    receivedAt = performance.now();
    if (process !== null && process.replica !== hello.replica) {
      notice(process.started < hello.started
        ? "The picker was restarted: its counters and its history began again."
        : `Another replica shows this page now: ${hello.replica}.`);
    }
    process = hello;
    freshness();
  }

  function notice(text) {
    element("notice").textContent = text;
    element("notice").hidden = false;
    setTimeout(() => { element("notice").hidden = true; }, 60000);
  }

  function freshness() {
    const age = performance.now() - receivedAt;
    const lost = source === null || source.readyState !== EventSource.OPEN || age > SILENT_MS;
    connection.classList.toggle("lost", lost);
    let text = paused ? "Paused" : "Live";
    if (lost) text = `Connection lost, trying again; figures are ${Math.round(age / 1000)} s old`;
    if (element("freshness").textContent !== text) element("freshness").textContent = text;
  }

  // One sentence for screen readers when the number of endpoints that need attention changes.
  function announce() {
    const rows = [...document.querySelectorAll(".endpoints tbody tr")];
    const count = rows.filter((row) => Number(row.dataset.severity) >= 2).length;
    if (count === attention || performance.now() - saidAt < SAY_MS) return;
    if (attention !== null) element("announcement").textContent = `${count} of ${rows.length} endpoints need attention`;
    attention = count;
    saidAt = performance.now();
  }

  // -- the form

  async function explain(submitted) {
    submitted.preventDefault();
    const form = submitted.target;
    const button = form.querySelector("button");
    button.disabled = true;
    let answer;
    try {
      const response = await fetch("./?fragment", { method: "POST", body: new URLSearchParams(new FormData(form)) });
      const text = await response.text();
      answer = response.headers.get("Content-Type").startsWith("text/html") ? parsed(text) : text;
    } catch {
      answer = "The picker did not answer; try again.";
    }
    button.disabled = false;
    element("explanation").replaceChildren(answer);
    const heading = element("explanation").querySelector("h3");
    if (heading !== null) heading.focus();
  }

  // controls that work with scripts only
  element("view").innerHTML = `
    <label>Find <input type="search" id="find" autocomplete="off" placeholder="name or address"></label>
    <label>Show <select id="show"><option value="">all</option><option value="attention">need attention</option>
      <option value="ok">ready</option><option value="full">full</option>
      <option value="approximate">approximate mode</option><option value="down">down</option></select></label>
    <label>Order <select id="order"><option value="">worst first</option><option value="name">name</option>
      <option value="load">load</option><option value="backlog">backlog</option><option value="kv">KV cache</option>
      <option value="hit">from cache</option><option value="rate">requests</option></select></label>
    <span id="shown" class="quiet"></span>`;
  connection.insertAdjacentHTML("beforeend", '<button type="button" id="pause" aria-pressed="false">Pause</button>');
  for (const id of Object.keys(show)) element(id).addEventListener("input", viewChanged);
  element("view").addEventListener("submit", (submitted) => submitted.preventDefault());
  element("question").addEventListener("submit", explain);
  element("pause").addEventListener("click", () => {
    paused = !paused;
    element("pause").setAttribute("aria-pressed", String(paused));
    element("pause").textContent = paused ? "Resume" : "Pause";
    render();
    freshness();
  });
  viewChanged();
  connect();
  freshness();
  setInterval(freshness, 1000);
})();
