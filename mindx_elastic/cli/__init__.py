"""The console command ``mindx-elastic``: `main` joins the commands, one file each."""
