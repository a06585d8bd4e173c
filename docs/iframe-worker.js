// A page that is opened as a file may start no worker. There, the script of a worker (that of the search) runs in a
// hidden frame instead. The plugin `offline` of mkdocs-material would take a script of this name from another host.
if (location.protocol === "file:") {
  const script = (inner, url) => new Promise((loaded) => {
    const tag = inner.document.createElement("script");
    Object.assign(tag, { src: url, onload: loaded });
    inner.document.head.append(tag);
  });
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inner = frame.contentWindow;
      this.inner.postMessage = (data) => setTimeout(() => this.dispatchEvent(new MessageEvent("message", { data })));
      this.inner.importScripts = async (...urls) => { for (const each of urls) await script(this.inner, each); };
      this.ready = script(this.inner, url);
    }
    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
