/* The `exit` file: how the attempt ended. */
#ifndef EXIT_FILE_H
#define EXIT_FILE_H

#include <stdbool.h>
#include <stddef.h>

bool reserve_exit(size_t tasks);
void release_exit(void);
int end_attempt(void);

#endif
