/* Our descendants, and how they are signalled. `spare` is a child that is left out with its descendants; 0 for none. Implemented in
 * process_tree.c. */
#ifndef PROCESS_TREE_H
#define PROCESS_TREE_H

#include <stdbool.h>
#include <sys/types.h>

#include "text.h"

bool others_left(pid_t spare);
void signal_tree(int sig, pid_t except_group, pid_t spare);
void put_tree(struct text *t);
bool kill_user(uid_t uid);

#endif
