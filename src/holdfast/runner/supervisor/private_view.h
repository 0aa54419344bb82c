/* The private view of the host for a child. Implemented in private_view.c. */
#ifndef PRIVATE_VIEW_H
#define PRIVATE_VIEW_H

#include <stdbool.h>

bool make_private_tmp(void);
bool enter_private_view(void);
int probe_private_view(void);

#endif
