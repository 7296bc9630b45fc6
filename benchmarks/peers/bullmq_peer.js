// BullMQ: the verbs of verbs.py, and the job of job_run.py. Run where node_modules has bullmq and ioredis.
// Fast: 100 jobs at a time; jobs that are done leave no record.

'use strict';

const fs = require('node:fs');
const path = require('node:path');
const { createRequire } = require('node:module');
const { Queue, Worker } = createRequire(path.join(process.cwd(), 'x.js'))('bullmq');

const connection = { path: process.env.BENCH_SOCKET, maxRetriesPerRequest: null };
const opts = { removeOnComplete: true, removeOnFail: true };
const concurrency = Number(process.env.BENCH_CONCURRENCY || 0) || 100;
const block = Number(process.env.BENCH_BLOCK || 1);
const [verb, ...rest] = process.argv.slice(2);

const now = () => process.hrtime.bigint();
// setTimeout has a resolution of one millisecond, too coarse for jobs of a few milliseconds.
const pause = (ms) => { if (ms > 0) Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, ms); };

async function one(queue, seconds, most) {
  for (let n = 0; n < 20; n += 1) await queue.add('noop', { n }, opts);
  const began = now();
  let count = 0;
  while (count < most && Number(now() - began) / 1e9 < seconds) {
    await queue.add('noop', { n: count }, opts);
    count += 1;
  }
  console.log(count, Number(now() - began) / 1e9);
}

async function bulk(queue, count) {
  const began = now();
  for (let n = 0; n < count; n += 1000) {
    const size = Math.min(1000, count - n);
    await queue.addBulk(Array.from({ length: size }, (_, i) => ({ name: 'noop', data: { n: n + i }, opts })));
  }
  console.log(count, Number(now() - began) / 1e9);
}

async function arrivals(queue, file, ms) {
  const times = fs.readFileSync(file, 'utf8').trim().split('\n').map(BigInt);
  const began = now();
  for (const [n, offset] of times.entries()) {
    pause(Number(began + offset - now()) / 1e6);
    const data = { n, at: String(began + offset) };
    if (ms) data.ms = ms;
    await queue.add('noop', data, opts);
  }
}

function work() {
  const trace = fs.openSync(process.env.BENCH_TRACE, 'a');
  const write = (sent) => fs.writeSync(trace, `${now()} ${sent} ${process.pid}\n`);
  let count = 0;
  new Worker('bench', async ({ data }) => {
    if (data.at === undefined) {
      count += 1;
      if (count % block === 0) write(0);
      return;
    }
    write(data.at);
    // With one job at a time, blocking the process is fine and more exact.
    const overlaps = concurrency > 1 || data.ms > 1000;
    if (data.ms && overlaps) await new Promise((resolve) => { setTimeout(resolve, data.ms); });
    else if (data.ms) pause(data.ms);
  }, { connection, concurrency });
}

async function enqueue() {
  const queue = new Queue('bench', { connection });
  if (verb === 'one') await one(queue, Number(rest[0]), Number(rest[1]));
  else if (verb === 'arrivals') await arrivals(queue, rest[0], Number(rest[1]));
  else await bulk(queue, Number(rest[0]));
  process.exit(0);
}

if (verb === 'work') work();
else enqueue().catch((err) => { console.error(err); process.exit(1); });
