// pg-boss: LISTEN/NOTIFY on, batches of 1,000 without a pause while they come back full, two workers per process.
import { PgBoss } from "pg-boss";
import { ready, run, stamp } from "./serve.mjs";

const DAY_SECONDS = 86_400;

class Boss {
  constructor(url) {
    this.url = url;
  }

  async start(options) {
    this.boss = new PgBoss({ connectionString: this.url, schedule: false, ...options });
    this.boss.on("error", (error) => console.error(error));
    await this.boss.start();
  }

  async install() {
    await this.start({});
    await this.boss.createQueue("noop", { notify: true });
    await this.boss.createQueue("stamp", { notify: true });
    await this.boss.stop();
  }

  async open() {
    await this.start({ supervise: false });
  }

  async bulk(count, at) {
    const [name, data] = this.job(at);
    await this.boss.insert(name, Array.from({ length: count }, () => ({ data })));
  }

  async one(at) {
    await this.boss.send(...this.job(at));
  }

  job(at) {
    return at === null ? ["noop", {}] : ["stamp", { at }];
  }

  async future(count) {
    await this.boss.insert("noop", Array.from({ length: count }, () => ({ data: {}, startAfter: DAY_SECONDS })));
  }

  async close() {
    await this.boss.stop();
  }

  async work() {
    await this.start({ useListenNotify: true });
    const options = { batchSize: 1000, burstWhenBatchFull: true, localConcurrency: 2, pollingIntervalSeconds: 0.5 };
    await this.boss.work("noop", options, async () => {});
    await this.boss.work("stamp", { ...options, localConcurrency: 1 }, async (jobs) => {
      for (const { data } of jobs) stamp(data.at);
    });
    process.on("SIGTERM", async () => {
      await this.boss.stop();
      process.exit(0);
    });
    ready();
  }
}

await run((url) => new Boss(url));
