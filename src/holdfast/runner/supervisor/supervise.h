/* The main steps of an attempt. Implemented in supervise.c. */
#ifndef SUPERVISE_H
#define SUPERVISE_H

void open_standard_descriptors(void);
void close_inherited(unsigned first);
void prepare_supervisor(void);
int exit_with(int status, const char *what);
int supervise(void);

#endif
