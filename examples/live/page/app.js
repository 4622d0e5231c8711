// The microphone and the camera of this browser, each as a stream over a WebSocket.
const PICTURES_PER_SECOND = 10;
const MOST_UNSENT = 64 * 1024;   // bytes; what comes while so many wait is dropped
const MARKS = 320;               // answers on the timeline: ten seconds
const SPEECH_ABOVE = 0.5;
const RETRY_MS = 500;

const at = (id) => document.getElementById(id);
const say = (text) => { at("status").textContent = text; };

class Stream {
  // `path`: of the WebSocket. `row`: of the table. `show`: is called with each answer.
  constructor(path, row, show) {
    this.path = path;
    this.row = row;
    this.show = show;
    this.sent = [];          // when the frames without an answer were sent
    this.times = [];         // when the last answers came
    this.unsent = 0;
    this.dropped = 0;
    this.recovered = 0;
    this.connect();
  }

  connect() {
    this.socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}${this.path}`);
    this.sent = [];
    this.socket.onmessage = (event) => this.answered(JSON.parse(event.data));
    this.socket.onclose = () => {
      say("The server has closed the stream. Connecting again.");
      setTimeout(() => this.connect(), RETRY_MS);
    };
  }

  send(data) {
    if (this.socket.readyState !== WebSocket.OPEN || this.socket.bufferedAmount > MOST_UNSENT) {
      this.unsent += 1;
      this.set("drops", this.unsent + this.dropped);
      return false;
    }
    this.socket.send(data);
    this.sent.push(performance.now());
    return true;
  }

  answered(answer) {
    const now = performance.now();
    // Of pictures that were dropped on the way no answer comes. The drops say how many these are.
    const skipped = (answer.dropped ?? 0) - this.dropped;
    this.dropped += skipped;
    this.sent.splice(0, skipped);
    const sentAt = this.sent.shift();
    this.times = this.times.filter((time) => now - time < 1000).concat(now);
    this.set("fps", this.times.length);
    this.set("age", sentAt === undefined ? answer.age_ms.toFixed(1) : (now - sentAt).toFixed(1));
    this.set("drops", this.unsent + this.dropped);
    this.set("stage", answer.stage);
    this.set("recovered", answer.recovered);
    if (answer.recovered > this.recovered) {
      this.recovered = answer.recovered;
      say("A new driver has taken over.");
    }
    this.show(answer);
  }

  set(name, value) {
    this.row.querySelector(`.${name}`).textContent = value;
  }
}

const marks = [];

function showSpeech(answer) {
  marks.push(answer.speech);
  if (marks.length > MARKS) marks.shift();
  at("speech").textContent = answer.speech.toFixed(3);
  const mark = answer.speech >= SPEECH_ABOVE ? "somebody speaks" : "silence";
  if (at("mark").textContent !== mark) at("mark").textContent = mark;
  const canvas = at("timeline");
  const pen = canvas.getContext("2d");
  const width = canvas.width / MARKS;
  pen.clearRect(0, 0, canvas.width, canvas.height);
  marks.forEach((speech, index) => {
    pen.fillStyle = speech >= SPEECH_ABOVE ? "#0b6e4f" : "#9a9a9a";
    const height = Math.max(1, speech * canvas.height);
    pen.fillRect(index * width, canvas.height - height, width, height);
  });
}

function drawBoxes(picture, boxes) {
  const pen = picture.getContext("2d");
  pen.strokeStyle = "#d00000";
  pen.lineWidth = 2;
  for (const [left, top, right, bottom] of boxes) pen.strokeRect(left, top, right - left, bottom - top);
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
  const stream = new Stream("/voice", at("voice-row"), showSpeech);
  const blocks = new AudioWorkletNode(context, "blocks", { numberOfOutputs: 0 });
  blocks.port.onmessage = (event) => stream.send(event.data.buffer);
  source.connect(blocks);
}

async function watch() {
  const video = at("video");
  const picture = at("picture");
  video.srcObject = await navigator.mediaDevices.getUserMedia({ video: { width: 640, height: 512 } });
  await video.play();
  const small = document.createElement("canvas");
  small.width = picture.width;
  small.height = picture.height;
  let boxes = [];
  const stream = new Stream("/camera", at("camera-row"), (answer) => {
    boxes = answer.boxes;
    at("count").textContent = boxes.length;
  });
  setInterval(() => {
    small.getContext("2d").drawImage(video, 0, 0, small.width, small.height);
    picture.getContext("2d").drawImage(small, 0, 0);
    drawBoxes(picture, boxes);
    small.toBlob((jpeg) => { if (jpeg) stream.send(jpeg); }, "image/jpeg", 0.8);
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
