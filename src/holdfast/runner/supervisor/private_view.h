/* What the child of a private spec sees of the host. */
#ifndef PRIVATE_VIEW_H
#define PRIVATE_VIEW_H

#include <stdbool.h>

bool make_private_tmp(void);
bool see_privately(void);
int probe_privacy(void);

#endif
