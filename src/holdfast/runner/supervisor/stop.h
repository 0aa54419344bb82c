/* The stop sequence: ask, wait, kill everything, until nothing is left. */
#ifndef STOP_H
#define STOP_H

#include <stdbool.h>

#include "clock.h"
#include "protocol.h"

extern const char *const CAUSES[CAUSE_COUNT];

extern struct stop_state {
    enum cause reason; /* the first one that was signalled for */
    const char *by;    /* command, signal or limit */
    bool stopping, killing, killed;
    micros kill_at, next, pause, since, tell_at;
} stop_state;

void stop(enum cause reason, const char *by, micros grace);
void start_killing(void);
void advance_stop(void);
micros limit_of(enum cause *reason);
void check_limits(void);

#endif
