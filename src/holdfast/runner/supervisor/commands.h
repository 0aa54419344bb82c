/* Commands of the owner. */
#ifndef COMMANDS_H
#define COMMANDS_H

#include <stdbool.h>
#include <stdint.h>

#include "clock.h"

extern uint64_t highest_token; /* a command with a lower one is refused */
extern micros next_look;       /* when `cmd` is looked at without a notice */

void watch_commands(void);
void look_for_commands(bool noticed);

#endif
