// What both Node peers share: the commands of the client, and the clock of stamp jobs. See programs/serve.py, its twin.
import { openSync, writeSync } from "node:fs";
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";

const PACED_BATCH = 20;
let stamps = null;

export const ready = () => console.log("ready");

// Both this and Python's time.monotonic_ns() read CLOCK_MONOTONIC.
const now = () => process.hrtime.bigint();

export function stamp(at) {
  const began = now();
  stamps ??= openSync(process.env.BENCH_STAMPS, "a");
  writeSync(stamps, `${at} ${began}\n`);
}

async function paced(program, rate, seconds) {
  const began = performance.now();
  for (let n = 0; n < Math.floor((rate * seconds) / PACED_BATCH); n++) {
    await sleep(Math.max(0, began + (n * PACED_BATCH * 1000) / rate - performance.now()));
    await program.bulk(PACED_BATCH, String(now()));
  }
}

async function command(program, said) {
  switch (said.do) {
    case "bulk":
      return program.bulk(said.count, null);
    case "singles":
      for (let n = 0; n < said.count; n++) await program.one(null);
      return;
    case "stamps":
      for (let n = 0; n < said.count; n++) {
        await sleep(said.every * 1000);
        await program.one(String(now()));
      }
      return;
    case "paced":
      return paced(program, said.rate, said.seconds);
    case "future":
      return program.future(said.count);
  }
}

async function serve(program) {
  await program.open();
  ready();
  for await (const line of createInterface({ input: process.stdin })) {
    const started = performance.now();
    await command(program, JSON.parse(line));
    console.log(JSON.stringify({ seconds: (performance.now() - started) / 1000 }));
  }
  await program.close();
}

// The whole program: `node PROGRAM MODE URL`.
export async function run(make) {
  const [mode, url] = process.argv.slice(2);
  const program = make(url);
  const modes = { install: () => program.install(), client: () => serve(program), worker: () => program.work() };
  await modes[mode]();
}
