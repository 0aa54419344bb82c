// Graphile Worker with its documented batching: a local queue of 500, completions batched, 24 jobs at once.
import { Logger, makeWorkerUtils, run as runWorker, runMigrations } from "graphile-worker";
import { ready, run, stamp } from "./serve.mjs";

const logger = new Logger(() => () => {});
const DAY = 86_400_000;

class Graphile {
  constructor(url) {
    this.preset = { worker: { connectionString: url, logger } };
  }

  async install() {
    await runMigrations({ preset: this.preset });
  }

  async open() {
    this.utils = await makeWorkerUtils({ preset: this.preset });
  }

  spec(at, more = {}) {
    return at === null ? { identifier: "noop", payload: {}, ...more } : { identifier: "stamp", payload: { at } };
  }

  async bulk(count, at) {
    await this.utils.addJobs(Array.from({ length: count }, () => this.spec(at)));
  }

  async one(at) {
    const { identifier, payload } = this.spec(at);
    await this.utils.addJob(identifier, payload);
  }

  async future(count) {
    const runAt = new Date(Date.now() + DAY);
    await this.utils.addJobs(Array.from({ length: count }, () => this.spec(null, { runAt })));
  }

  async close() {
    await this.utils.release();
  }

  async work() {
    const batched = {
      concurrentJobs: 24,
      maxPoolSize: 26,
      localQueue: { size: 500, refetchDelay: { durationMs: 10 } },
      completeJobBatchDelay: 0,
      failJobBatchDelay: 0,
    };
    const taskList = { noop: () => {}, stamp: ({ at }) => stamp(at) };
    const runner = await runWorker({ preset: { worker: { ...this.preset.worker, ...batched } }, taskList });
    ready();
    await runner.promise;
  }
}

await run((url) => new Graphile(url));
