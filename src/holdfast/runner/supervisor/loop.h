/* The wait for whatever comes next: a signal, output, a command or a deadline. */
#ifndef LOOP_H
#define LOOP_H

#include <stdbool.h>

void prepare_signals(void);
bool wait_for_news(void);

#endif
