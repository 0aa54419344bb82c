/* Commands from the worker that owns the attempt. Implemented in commands.c. */
#ifndef COMMANDS_H
#define COMMANDS_H

#include <stdbool.h>
#include <stdint.h>

#include "clock.h"

extern uint64_t highest_token; /* a command with a lower token is refused */
extern micros next_poll;       /* when `cmd` is read even without a notification */

void watch_commands(void);
void poll_commands(bool noticed);

#endif
