// The smallest worker for exec: in Node.js.
'use strict';
require('node:readline').createInterface({ input: process.stdin }).on('line', (line) => {
  const { uuid } = JSON.parse(line).payload;
  process.stdout.write(JSON.stringify({ topic: 'job_finished', payload: { uuid } }) + '\n');
});
