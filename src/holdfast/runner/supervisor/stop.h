/* The stop sequence: SIGTERM, a grace period, SIGKILL until no process is left. Implemented in stop.c. */
#ifndef STOP_H
#define STOP_H

#include <stdbool.h>

#include "clock.h"
#include "protocol.h"

extern const char *const CAUSES[CAUSE_COUNT];

extern struct stop_state {
    enum cause reason; /* the reason of the first signal */
    const char *by;    /* command, signal, limit or service */
    bool stopping, killing, killed;
    micros kill_at, next, pause, since, report_at;
} stop_state;

void stop(enum cause reason, const char *by, micros grace);
void start_killing(void);
void advance_stop(void);
micros limit_of(enum cause *reason);
void check_limits(void);

#endif
