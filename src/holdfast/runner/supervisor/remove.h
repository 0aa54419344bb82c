/* Removal of folder trees. Implemented in remove.c. */
#ifndef REMOVE_H
#define REMOVE_H

#include <stdbool.h>

bool remove_entry(int above, const char *name);
bool remove_below(int above, const char *name);
int run_remover(const char *spare_folders);

#endif
