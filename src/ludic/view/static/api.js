// Questions to the server, and a watch for what is new.

export async function ask(name, params = {}, signal) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(params)) {
    for (const each of [value].flat()) {
      if (each !== null && each !== undefined && each !== "") query.append(key, each);
    }
  }
  const response = await fetch(`/api/${name}?${query}`, { signal });
  const body = await response.json().catch(() => ({ error: `the server answered ${response.status}` }));
  if (!response.ok) throw new Error(body.error ?? `the server answered ${response.status}`);
  return body;
}

const EVERY = 1500;

// Calls `changed` when something about the run is new since `version`, and `onState` with every answer.
export function watch(run, changed, onState = () => {}, version = null) {
  let timer = null;
  let ended = false;
  async function look() {
    try {
      if (!document.hidden) {
        const state = await ask("state", run ? { run } : {});
        if (ended) return;
        onState(state);
        if (version !== null && state.version !== version) changed(state);
        version = state.version;
      }
    } catch (error) {
      if (!ended) onState({ lost: error.message });
    }
    if (!ended) timer = setTimeout(look, EVERY);
  }
  look();
  return () => {
    ended = true;
    clearTimeout(timer);
  };
}
