/* The output of the running task. Implemented in output.c. */
#ifndef OUTPUT_H
#define OUTPUT_H

#include <stdbool.h>

bool may_read(int stream);
void read_outputs(void);
bool drain_outputs(void);

#endif
