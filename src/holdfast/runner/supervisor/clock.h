/* Time in whole microseconds. Deadlines use CLOCK_BOOTTIME, which also advances while the machine sleeps. The wall clock is
 * only for times that people read. The deadlines themselves are in stop.c and loop.c. */
#ifndef CLOCK_H
#define CLOCK_H

#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#define MS 1000ll
#define SECOND 1000000ll
#define NEVER INT64_MAX

typedef int64_t micros;

static inline micros read_clock(clockid_t id) {
    struct timespec t;
    clock_gettime(id, &t);
    return (micros)t.tv_sec * SECOND + t.tv_nsec / 1000;
}

static inline micros boottime(void) { return read_clock(CLOCK_BOOTTIME); }
static inline micros walltime(void) { return read_clock(CLOCK_REALTIME); }

static inline micros later(micros from, micros by) { return by > NEVER - from ? NEVER : from + by; }
static inline micros sooner(micros a, micros b) { return a < b ? a : b; }

/* Convert a deadline of the wall clock to CLOCK_BOOTTIME, so that later jumps of the wall clock do not move it. */
static inline micros to_boottime(micros deadline, bool wall) {
    if (!wall || deadline == NEVER)
        return deadline;
    return boottime() + (deadline - walltime());
}

#endif
