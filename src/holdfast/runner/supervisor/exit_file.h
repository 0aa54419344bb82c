/* The exit record `exit`: how the attempt ended. Implemented in exit_file.c. */
#ifndef EXIT_FILE_H
#define EXIT_FILE_H

#include <stdbool.h>
#include <stddef.h>

bool reserve_exit(size_t tasks);
void release_exit(void);
int end_attempt(void);

#endif
