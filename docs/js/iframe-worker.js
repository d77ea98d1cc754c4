/* Search in pages that are opened from files: browsers start no Worker there. A hidden frame takes its place. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.waiting = []
      window.addEventListener("message", event => {
        if (event.source === frame.contentWindow)
          this.dispatchEvent(new MessageEvent("message", { data: event.data }))
      })
      const start = `
        window.postMessage = data => parent.postMessage(data, "*")
        window.importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise(done => {
          const script = document.createElement("script")
          script.src = url
          script.onload = done
          document.body.append(script)
        })), Promise.resolve())`
      const content = frame.contentWindow.document
      content.open()
      content.write(`<body><script>${start}</` + `script><script src="${new URL(url, location.href)}"></` + `script></body>`)
      content.close()
      frame.contentWindow.addEventListener("load", () => {
        this.frame = frame
        this.waiting.splice(0).forEach(data => this.postMessage(data))
      })
    }

    postMessage(data) {
      if (this.frame)
        this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) }))
      else
        this.waiting.push(data)
    }

    terminate() {}
  }
}
