// No-op jobs with BullMQ: `node bullmq_noop.js fill N` adds them, `drain N` runs them and prints the seconds.
// Run where node_modules has bullmq and ioredis. BENCH_PORT: the server's port on loopback.

'use strict';

const path = require('node:path');
const { createRequire } = require('node:module');
const { Queue, Worker } = createRequire(path.join(process.cwd(), 'x.js'))('bullmq');

const connection = { host: '127.0.0.1', port: Number(process.env.BENCH_PORT), maxRetriesPerRequest: null };
const [what, count] = [process.argv[2], Number(process.argv[3])];

async function fill() {
  const queue = new Queue('bench', { connection });
  // As in forq, a job that is done leaves no record.
  const opts = { removeOnComplete: true };
  for (let n = 0; n < count; n += 1000) {
    const size = Math.min(1000, count - n);
    await queue.addBulk(Array.from({ length: size }, (_, i) => ({ name: 'noop', data: { n: n + i }, opts })));
  }
  await queue.close();
}

async function drain() {
  let done = 0;
  const worker = new Worker('bench', async () => {}, { connection, concurrency: 1, autorun: false });
  await worker.waitUntilReady();
  const began = process.hrtime.bigint();
  await new Promise((resolve) => {
    worker.on('completed', () => { if (++done === count) resolve(); });
    worker.run();
  });
  console.log(Number(process.hrtime.bigint() - began) / 1e9);
  await worker.close();
}

(what === 'fill' ? fill() : drain()).then(() => process.exit(0), (err) => { console.error(err); process.exit(1); });
