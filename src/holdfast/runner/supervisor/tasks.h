/* The tasks of the attempt, one after the other. */
#ifndef TASKS_H
#define TASKS_H

#include <stdbool.h>

#include "clock.h"

extern struct held {
    bool on;       /* no task runs, and a command is awaited */
    bool go, end;  /* the command that came */
    unsigned next; /* the task that is next, from 0; the number of tasks if none is */
} held;

extern micros attempt_begun, attempt_begun_at; /* on CLOCK_BOOTTIME, and on the wall clock */

int run_tasks(void);

#endif
