/* The launcher: starts supervisors for one worker. Implemented in launcher.c. */
#ifndef LAUNCHER_H
#define LAUNCHER_H

int run_launcher(int argc, char **argv);

#endif
