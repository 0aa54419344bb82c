/* Waiting for the next signal, output, command or deadline. Implemented in loop.c. */
#ifndef LOOP_H
#define LOOP_H

#include <stdbool.h>

void prepare_signals(void);
bool wait_for_activity(void);

#endif
