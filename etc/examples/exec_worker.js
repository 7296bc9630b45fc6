#!/usr/bin/env node
// A worker in Node.js for `--handler "exec:/usr/bin/node /path/exec_worker.js"`; no packages needed.
//
// One message per line on stdin, one per line on stdout; whatever is for people goes to stderr (console.error), and from
// there to forq's log. One job at a time: the next one comes after job_finished or job_failed.

'use strict';

const readline = require('node:readline');

function say(topic, payload) {
  process.stdout.write(JSON.stringify({ topic, payload }) + '\n');
}

// What the worker does. Returns, or throws; `err.permanent = true` means: do not try again.
async function handle(data, job, progress) {
  if (data === null || typeof data !== 'object') return;
  if (data.fail) throw Object.assign(new Error(data.fail), { permanent: data.permanent === true });
  for (let step = 1; step <= (data.steps || 0); step++) {
    await new Promise((resolve) => setTimeout(resolve, 20));
    progress(step / data.steps, `step ${step} of ${data.steps}`);
  }
  if (data.greet) console.error(`hello, ${data.greet}`);
}

async function run(job) {
  const about = { uuid: job.uuid, queue_name: job.queue_name, worker_uuid: job.worker_uuid };
  try {
    await handle(job.data, job, (progress, text) => say('worker_progress', { ...about, progress, text }));
    say('job_finished', about);
  } catch (err) {
    const error = { name: err.name, message: err.message, traceback: err.stack };
    say('job_failed', { ...about, error, kind: err.permanent ? 'permanent' : 'retriable', retry_at: err.retryAt });
  }
}

// When stdin ends there are no more jobs: nothing is left to wait for, and the program ends.
readline.createInterface({ input: process.stdin, crlfDelay: Infinity }).on('line', (line) => {
  const { topic, payload } = JSON.parse(line);
  if (topic === 'job_assignment') run(payload);
});
