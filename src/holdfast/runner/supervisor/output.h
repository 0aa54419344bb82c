/* The output of the task that runs. */
#ifndef OUTPUT_H
#define OUTPUT_H

#include <stdbool.h>

bool rested(int stream);
void read_outputs(void);
bool drain_outputs(void);

#endif
