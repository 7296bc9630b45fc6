// An external worker of forq in Node.js, without packages: node external_worker.js SOCKET QUEUE
// It connects to a bridge that listens at SOCKET (docs/guide/external-workers.md), and runs jobs of the commands below.
'use strict';
const net = require('net');
const readline = require('readline');
const crypto = require('crypto');
const { execFile } = require('child_process');

const [socketPath, queueName] = process.argv.slice(2);
const TICK_MS = 1000 * (process.env.TICK_SECONDS || 2);  // less than the tick of the bridge
const worker = { queue_name: queueName, worker_uuid: crypto.randomUUID() };
let running = null;  // the job, from its acceptance to its end
let lastFence = 0;   // an assignment may come twice: only a later one is a new job

const handlers = {
  // A text for sh -c; exit status 0 is success.
  sh(args) {
    return new Promise((resolve, reject) => execFile('sh', ['-c', args], (error) => (error ? reject(error) : resolve())));
  },
  // Takes args.ms milliseconds; fails if args say so.
  async work(args, progress) {
    const steps = 4;
    for (let step = 1; step <= steps; step++) {
      await new Promise((resolve) => setTimeout(resolve, ((args && args.ms) || 0) / steps));
      progress(step / steps, `step ${step} of ${steps}`);
    }
    if (args && args.fail) throw new Error(args.fail);
    return { steps };
  },
};

const bridge = net.connect(socketPath);
const say = (topic, payload) => bridge.write(JSON.stringify({ topic, payload: { ...worker, ...payload } }) + '\n');

async function run(job) {
  if (running || job.fence <= lastFence) return;
  lastFence = job.fence;
  running = { uuid: job.uuid, fence: job.fence, progress: 0, text: '' };
  const mine = running;
  say('job_accepted', { uuid: job.uuid, fence: job.fence });
  console.log(`accepted ${job.uuid} ${job.fence}`);
  try {
    const handler = handlers[job.command];
    if (!handler) throw Object.assign(new Error(`no command ${job.command}`), { kind: 'permanent' });
    const result = await handler(job.args, (progress, text) => {
      Object.assign(mine, { progress, text });
      if (running === mine) say('worker_progress', mine);
    });
    if (running !== mine) return;  // it was refused: another worker has it
    running = null;
    say('job_finished', { uuid: job.uuid, fence: job.fence, result });
    console.log(`ended ${job.uuid} ${job.fence}`);
  } catch (error) {
    if (running !== mine) return;
    running = null;
    const kind = error.kind || 'retriable';
    say('job_failed', { uuid: job.uuid, fence: job.fence, error: { name: error.name, message: error.message }, kind });
  }
}

readline.createInterface({ input: bridge }).on('line', (line) => {
  const { topic, payload } = JSON.parse(line);
  if (topic === 'job_assignment') run(payload);
  else if (topic === 'job_refused' && running && payload.uuid === running.uuid) running = null;
  else if (topic === 'error') console.error(payload.reason);
});

// Sign of life: what this worker is doing.
const beat = () => {
  if (running) say('worker_progress', running);
  else say('worker_idle', {});
};
bridge.on('connect', beat);
setInterval(beat, TICK_MS);
bridge.on('close', () => process.exit(1));
bridge.on('error', (error) => { console.error(error.message); process.exit(1); });
