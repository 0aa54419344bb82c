/* Time, in whole microseconds. Deadlines are on CLOCK_BOOTTIME, which also counts while the machine sleeps; the wall clock is for
 * times that people read. Which deadlines there are is in stop.c and loop.c. */
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

/* Convert a deadline of the wall clock once; later jumps of that clock change nothing. */
static inline micros in_boottime(micros deadline, bool wall) {
    if (!wall || deadline == NEVER)
        return deadline;
    return boottime() + (deadline - walltime());
}

#endif
