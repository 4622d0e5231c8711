// The microphone and the camera of this browser, each as a stream over a WebSocket, and what the runtime says of them.
const PICTURES_PER_SECOND = 10;
const DRAWINGS_PER_SECOND = 25;
const WIDTH = 320, HEIGHT = 256;   // of the pictures that are sent
const MOST_UNSENT = 64 * 1024;     // bytes; what comes while so many wait is dropped
const BLOCKS = 625;                // of sound that are shown: 20 seconds
const PEAKS = 2;                   // of each block
const PLOT_MS = 20000;
const LATENCIES = [1, 10, 100, 1000, 10000];   // ms: the lines of the plot, from the bottom to the top
const SPEECH_ABOVE = 0.5;
const STALE_MS = 700;              // without an answer: then the video is shown, with boxes of an older picture
const RETRY_MS = 500;
const EVENTS = 20;                 // lines that are kept; the last three can be seen
const MARK_ROWS = 5;               // of words beside the marks in the plot

const at = (id) => document.getElementById(id);
const say = (text) => { at("status").textContent = text; };

// The colours of the style sheet. Its dark ones hold as soon as the system says so.
const colours = {};
const dark = matchMedia("(prefers-color-scheme: dark)");
dark.onchange = () => {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["panel", "faint", "line", "band", "voice", "onnxruntime", "openvino", "death", "start", "swap"]) colours[name] = style.getPropertyValue(`--${name}`);
};
dark.onchange();

function listenTo(path, message, closed) {
  const socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}${path}`);
  socket.onmessage = (event) => message(JSON.parse(event.data));
  socket.onclose = closed;
  return socket;
}

class Stream {
  // `path`: of the WebSocket. `row`: of the table. `show`: is called with each answer and with what was sent for it.
  constructor(path, row, show) {
    this.path = path;
    this.row = row;
    this.show = show;
    this.sent = [];          // the frames without an answer: number, when it was sent, and what it holds
    this.answers = [];       // the last ones, each with `at`, `age` and `stage`
    this.unsent = 0;
    this.dropped = 0;
    this.recovered = 0;
    this.connect();
  }

  connect() {
    this.sent = [];
    this.numbers = 0;
    this.socket = listenTo(this.path, (answer) => this.answered(answer), () => {
      say("The server has closed the stream. Connecting again.");
      setTimeout(() => this.connect(), RETRY_MS);
    });
  }

  send(data, frame) {
    if (this.socket.readyState !== WebSocket.OPEN || this.socket.bufferedAmount > MOST_UNSENT) {
      this.unsent += 1;
      this.set("drops", this.unsent + this.dropped);
      return;
    }
    this.socket.send(data);
    this.sent.push({ number: this.numbers++, at: performance.now(), frame });
  }

  answered(answer) {
    const now = performance.now();
    // Of pictures that were dropped on the way no answer comes. The drops say how many these are.
    while (this.sent[0]?.number < answer.number) this.sent.shift();
    this.dropped = answer.dropped ?? 0;
    const sent = this.sent.shift();
    const age = sent === undefined ? answer.age_ms : now - sent.at;
    this.answers = this.answers.filter((past) => now - past.at < PLOT_MS).concat({ at: now, age, stage: answer.stage });
    this.set("fps", this.answers.filter((past) => now - past.at < 1000).length);
    this.set("age", age.toFixed(1));
    this.set("drops", this.unsent + this.dropped);
    this.set("stage", answer.stage);
    this.row.dataset.stage = answer.stage;
    this.set("recovered", answer.recovered);
    if (answer.recovered > this.recovered) {
      this.recovered = answer.recovered;
      say("A new driver has taken over.");
    }
    this.show(answer, sent?.frame);
  }

  set(name, value) {
    this.row.querySelector(`.${name}`).textContent = value;
  }
}

// What the runtime says. Of its events these are shown: the kind, the words of the list and those of the mark in the plot.
const STATES = { serving: "serves", replaced: "is replaced", rejected: "is rejected" };
const SHOWN = {
  DriverEnded: ({ device, pid, cause, exit_code: code }) => cause !== "closed" &&
    ["death", `${device}: driver ${pid} died (${cause === "signal" ? `signal ${-code}` : cause})`, `${device} died`],
  DriverStarted: ({ device, pid, seconds }) => ["start", `${device}: driver ${pid} ready after ${seconds.toFixed(2)} s`, `${device} ready`],
  StageChanged: ({ compilation, stage, state }) => state !== "waiting" &&
    [state === "serving" ? "swap" : "step", `${compilation}: ${stage} ${STATES[state] ?? `is ${state}`}`, `${stage} serves`],
};
let marks = [];
let happenings = 0;

function happened(event) {
  const [kind, text, label] = SHOWN[event.event]?.(event) || [];
  if (kind === undefined) return;
  const now = performance.now();
  marks = marks.filter((mark) => now - mark.at < PLOT_MS);
  if (kind !== "step") marks.push({ at: now, kind, label, row: happenings++ % MARK_ROWS });
  const line = document.createElement("li");
  line.className = kind;
  line.textContent = `${new Date().toLocaleTimeString("en-GB")} ${text}`;
  at("events").append(line);
  if (at("events").children.length > EVENTS) at("events").firstChild.remove();
}

const listenToEvents = () => listenTo("/events", happened, () => setTimeout(listenToEvents, RETRY_MS));

// Each canvas has the pixels of the screen, and is drawn in those of the page.
function cleared(canvas) {
  const ratio = devicePixelRatio;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  const pixels = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== pixels[0] || canvas.height !== pixels[1]) [canvas.width, canvas.height] = pixels;
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "11px system-ui, sans-serif";
  return [pen, width, height];
}

let voice, camera;
let boxes = [];
let looked = null;           // the picture that the boxes belong to
let blocks = [];             // of sound: `peaks`, and `speech` as soon as its answer is there

function showSpeech(answer, block) {
  if (block) block.speech = answer.speech;
  at("speech").textContent = answer.speech.toFixed(3);
  const mark = answer.speech >= SPEECH_ABOVE ? "somebody speaks" : "silence";
  if (at("mark").textContent !== mark) at("mark").textContent = mark;
}

function drawSound() {
  const [pen, width, height] = cleared(at("timeline"));
  const step = width / BLOCKS;
  const first = BLOCKS - blocks.length;
  const [band, speech, silence] = [new Path2D(), new Path2D(), new Path2D()];
  blocks.forEach((block, index) => {
    const left = (first + index) * step;
    const speaks = block.speech >= SPEECH_ABOVE;
    if (speaks) band.rect(left, 0, step, height);
    block.peaks.forEach((peak, part) => {
      const tall = Math.max(1, Math.min(1, 3 * peak) * height);
      (speaks ? speech : silence).rect(left + part * step / PEAKS, (height - tall) / 2, step / PEAKS, tall);
    });
  });
  for (const [name, path] of [["band", band], ["voice", speech], ["faint", silence]]) {
    pen.fillStyle = colours[name];
    pen.fill(path);
  }
}

function drawPlot(now) {
  const [pen, width, height] = cleared(at("plot"));
  const left = 40;
  pen.strokeStyle = colours.panel;  // around words, so that they can be read above points
  pen.lineWidth = 3;
  const x = (when) => left + (1 - (now - when) / PLOT_MS) * (width - left);
  const [least, most] = [LATENCIES[0], LATENCIES.at(-1)].map(Math.log);
  const y = (ms) => height - 8 - (Math.log(Math.min(Math.max(ms, LATENCIES[0]), LATENCIES.at(-1))) - least) / (most - least) * (height - 16);
  for (const ms of LATENCIES) {
    pen.fillStyle = colours.line;
    pen.fillRect(left, y(ms), width - left, 1);
    pen.fillStyle = colours.faint;
    pen.textAlign = "right";
    pen.fillText(ms, left - 4, y(ms) + 4);
  }
  for (const [stream, own] of [[voice, "voice"], [camera, null]]) {
    for (const answer of stream?.answers ?? []) {
      pen.fillStyle = colours[own ?? answer.stage];
      if (x(answer.at) >= left) pen.fillRect(x(answer.at) - 1, y(answer.age) - 1, own ? 2 : 3, own ? 2 : 3);
    }
  }
  // Deaths last, because the next driver can be ready within the width of a line.
  for (const mark of marks.toSorted((one, other) => (one.kind === "death") - (other.kind === "death"))) {
    if (x(mark.at) < left) continue;
    pen.fillStyle = colours[mark.kind];
    pen.fillRect(Math.round(x(mark.at)), 0, 2, height);
    const before = x(mark.at) > width * 0.7;
    pen.textAlign = before ? "right" : "left";
    for (const how of ["strokeText", "fillText"]) pen[how](mark.label, x(mark.at) + (before ? -4 : 5), 12 + mark.row * 14);
  }
}

function drawPicture(now) {
  const [pen, width, height] = cleared(at("picture"));
  const scale = Math.min(width / WIDTH, height / HEIGHT);
  pen.translate((width - WIDTH * scale) / 2, (height - HEIGHT * scale) / 2);
  pen.scale(scale, scale);
  const stale = now - (camera.answers.at(-1)?.at ?? -Infinity) > STALE_MS;
  pen.drawImage(stale ? at("video") : looked, 0, 0, WIDTH, HEIGHT);
  pen.setLineDash(stale ? [4, 4] : []);
  pen.strokeStyle = stale ? "#c0c0c0" : "#ff2d2d";
  pen.lineWidth = 2;
  for (const [left, top, right, bottom] of boxes) pen.strokeRect(left, top, right - left, bottom - top);
}

function draw() {
  const now = performance.now();
  if (blocks.length) drawSound();
  if (camera) drawPicture(now);
  drawPlot(now);
}

async function listen() {
  const sound = await navigator.mediaDevices.getUserMedia({
    audio: { channelCount: 1, echoCancellation: false, noiseSuppression: false, autoGainControl: false },
  });
  let context = new AudioContext({ sampleRate: 16000 });
  let source;
  try {
    source = context.createMediaStreamSource(sound);
  } catch {
    await context.close();  // this browser wants the microphone's rate; the worklet resamples
    context = new AudioContext();
    source = context.createMediaStreamSource(sound);
  }
  await context.resume();
  await context.audioWorklet.addModule("/page/worklet.js");
  voice = new Stream("/voice", at("voice-row"), showSpeech);
  const worklet = new AudioWorkletNode(context, "blocks", { numberOfOutputs: 0 });
  worklet.port.onmessage = ({ data }) => {
    const long = data.length / PEAKS;
    const peaks = Array.from({ length: PEAKS }, (_, part) => Math.max(...data.subarray(part * long, (part + 1) * long).map(Math.abs)));
    const block = { peaks };
    blocks = blocks.concat(block).slice(-BLOCKS);
    voice.send(data.buffer, block);
  };
  source.connect(worklet);
}

async function watch() {
  const video = at("video");
  video.srcObject = await navigator.mediaDevices.getUserMedia({ video: { width: 640, height: 512 } });
  await video.play();
  const small = document.createElement("canvas");
  small.width = WIDTH;
  small.height = HEIGHT;
  camera = new Stream("/camera", at("camera-row"), (answer, picture) => {
    boxes = answer.boxes;
    looked = picture ?? looked;
    at("count").textContent = boxes.length;
  });
  setInterval(async () => {
    const picture = await createImageBitmap(video);
    small.getContext("2d").drawImage(picture, 0, 0, WIDTH, HEIGHT);
    small.toBlob((jpeg) => { if (jpeg) camera.send(jpeg, picture); }, "image/jpeg", 0.8);
  }, 1000 / PICTURES_PER_SECOND);
}

function starting(button, start) {
  return async () => {
    button.disabled = true;
    try {
      await start();
      say("Running.");
    } catch (error) {
      button.disabled = false;
      say(`${button.textContent}: ${error.message || error.name}.`);
    }
  };
}

const startMicrophone = starting(at("microphone"), listen);
const startCamera = starting(at("camera"), watch);
at("microphone").onclick = startMicrophone;
at("camera").onclick = startCamera;
at("kill").onclick = async () => {
  const answer = await fetch("/kill", { method: "POST" });
  const { killed } = await answer.json();
  say(killed.length ? `Killed the driver of ${killed.join(", ")}.` : "No driver runs.");
};
listenToEvents();
globalThis.live = () => ({ now: performance.now(), voice: voice.answers, camera: camera.answers, blocks, marks });  // for docs/screenshots.py
setInterval(draw, 1000 / DRAWINGS_PER_SECOND);

// A browser that has the person's permission already needs no button.
async function permitted(name) {
  try {
    return (await navigator.permissions.query({ name })).state === "granted";
  } catch {
    return false;  // a browser that does not know the name
  }
}

if (await permitted("microphone")) startMicrophone();
if (await permitted("camera")) startCamera();
